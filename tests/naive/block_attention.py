"""Attention as products of heads on their columns, counted by loops over heads, blocks, tiles."""

from tests.naive.work import deal, turn_hops


def key_blocks(chunk, earlier):
    """Keys of every block: the chunk's own, then those before it in pieces of a chunk's length."""
    blocks = [chunk]
    while earlier > 0:
        blocks.append(min(chunk, earlier))
        earlier -= blocks[-1]
    return blocks


def head_columns(columns, heads):
    """Columns of one head, and how many heads each group of columns serves."""
    width = columns // heads if columns >= heads else 1
    return width, deal(heads, columns // width)


def multiplied(rows, columns, heads, chunk, earlier, key_width, value_width):
    """Multiply-accumulates of all cores, masked pairs included."""
    width, _ = head_columns(columns, heads)
    total = 0
    for _head in range(heads):
        for keys in key_blocks(chunk, earlier):
            for height in deal(chunk, rows):
                for piece in deal(keys, max(rows, width)):
                    for part in deal(key_width, width):
                        total += height * part * piece
                    for part in deal(value_width, width):
                        total += height * piece * part
    return total


def score_byte_hops(rows, columns, heads, chunk, earlier, key_width, element_bytes):
    """Bytes times hops of Q K^T: keys once around the rows, sums along a head's columns."""
    width, _ = head_columns(columns, heads)
    around, _ = turn_hops(rows, rows, 0, rows)
    total = 0
    for _head in range(heads):
        for keys in key_blocks(chunk, earlier):
            total += keys * key_width * around * element_bytes
            for _query in range(chunk):
                for _key in range(keys):
                    total += (width - 1) * element_bytes
    return total
