"""Work on a region's memories, against the dictionary of small arrays and plain equations."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.naive import numeric
from tests.naive import region as naive
from wafer_emu.dealing import groups_on_core
from wafer_emu.layout import Layout, element_bytes, no_matrix
from wafer_emu.placement import Region
from wafer_kernels import region_vector
from wafer_kernels.numeric import Activation
from wafer_kernels.region import Kind, copy_block, copy_rows, read_columns, read_rows, write_rows
from wafer_kernels.region_attention import Block, Heads, finish, gather, ring_pass
from wafer_kernels.region_cache import (
    ABSENT,
    EARLY,
    STALE,
    Cache,
    append,
    erase,
    read_cache,
    write_cache,
)
from wafer_kernels.region_product import compute_shift, row_vectors

KINDS = st.sampled_from(list(Kind))
lines, sizes, seeds = st.integers(1, 5), st.integers(1, 17), st.integers(0, 2**31)
BUFFERS = 30_000


class Cores:
    """A region of cores, in whose memories matrices are placed one after another."""

    def __init__(self, rows, columns, first_core=2):
        self.layout = Layout(Region(0, 0, rows, columns), first_core)
        self.bytes = np.full((first_core + rows * columns, 60_000), 0xFF, np.uint8)
        self.next = 1  # on purpose no multiple of four

    @property
    def grid(self):
        return self.layout.grid

    def addresses(self, at):
        return np.full(self.layout.region.cores, at, np.int64)

    def place(self, values, kind=Kind.FLOAT32, rows=None):
        rows = self.layout.rows(len(values)) if rows is None else rows
        element = element_bytes(kind)
        self.next += self.next % element if kind != Kind.FLOAT32 else 0
        address = self.addresses(self.next)
        self.next += int(self.layout.size(rows, values.shape[1], element).max())
        matrix = self.layout.matrix(kind, rows, values.shape[1], address)
        write_rows(self.bytes, self.grid, matrix, values)
        return matrix

    def read(self, matrix):
        values = np.empty((matrix.line.size, int(matrix.bounds[-1])), np.float32)
        read_rows(values, self.bytes, self.grid, matrix)
        return values

    def vector(self, values):
        copies = np.tile(values, (self.layout.region.rows, 1))
        return self.place(copies, rows=self.layout.copies)


def drawn(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@settings(max_examples=40, deadline=None)
@given(lines, lines, sizes, sizes, seeds)
def test_every_core_holds_its_tile(rows, columns, m, n, seed):
    cores, values = Cores(rows, columns), drawn(seed, m, n)
    matrix = cores.place(values)
    for (row, column), tile in naive.deal(values, rows, columns).items():
        memory = cores.bytes[2 + row * columns + column]
        found = memory[1 : 1 + 4 * tile.size].copy().view(np.float32)
        np.testing.assert_array_equal(found.reshape(tile.shape), tile)
    np.testing.assert_array_equal(cores.read(matrix), values)
    assert (cores.bytes[:2] == 0xFF).all()


@settings(max_examples=30, deadline=None)
@given(lines, lines, sizes, sizes, KINDS, st.data())
def test_bytes_are_copied_from_whichever_cores_hold_them(rows, columns, m, n, kind, data):
    cores = Cores(rows, columns)
    values = drawn(1, m, n).astype(np.float16).astype(np.float32)
    values = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)  # exact in every kind
    matrix, size = cores.place(values, kind), element_bytes(kind)
    twin = Cores(1, 1, 0)
    chosen = np.array(data.draw(st.lists(st.integers(0, m - 1), min_size=1, max_size=5)))
    first = data.draw(st.integers(0, n - 1))
    count = data.draw(st.integers(1, n - first))
    whole = twin.place(values[chosen, first : first + count].copy(), kind)
    copy_rows(cores.bytes, 0, BUFFERS, cores.grid, matrix, chosen, first, count)
    length = chosen.size * count * size
    begin = int(whole.address[0])
    np.testing.assert_array_equal(
        cores.bytes[0, BUFFERS : BUFFERS + length], twin.bytes[0, begin : begin + length]
    )
    part = data.draw(st.integers(0, columns - 1))
    low, high = matrix.bounds[part], matrix.bounds[part + 1]
    top = data.draw(st.integers(0, m - 1))
    if low < high:
        block = twin.place(values[top:, low:high].copy(), kind)
        copy_block(cores.bytes, 1, BUFFERS, cores.grid, matrix, top, m - top, part)
        length, begin = (m - top) * (high - low) * size, int(block.address[0])
        np.testing.assert_array_equal(
            cores.bytes[1, BUFFERS : BUFFERS + length], twin.bytes[0, begin : begin + length]
        )
    columns_read = np.empty((2, m), np.float32)
    read_columns(columns_read, cores.bytes, cores.grid, matrix, np.array([first, n - 1]))
    np.testing.assert_array_equal(columns_read, values[:, [first, n - 1]].T)


@settings(max_examples=40, deadline=None)
@given(lines, lines, sizes, sizes, sizes, seeds, st.integers(0, 3))
def test_compute_shift_bit_for_bit(rows, columns, m, k, n, seed, at):
    """Sums in the target's own memory, at addresses that are multiples of four or not."""
    cores, a, b = Cores(rows, columns), drawn(seed, m, k), drawn(seed + 1, k, n)
    left, right = cores.place(a), cores.place(b)
    cores.next += at
    target, every = cores.place(np.zeros((m, n), np.float32)), np.arange(m)
    half = rows * columns // 2
    for first, last in ((0, half), (half, rows * columns)):  # as two threads share it
        compute_shift(
            cores.bytes, cores.grid, left, every, right, target, every, no_matrix(),
            np.zeros(0, np.float32), cores.addresses(BUFFERS), cores.addresses(BUFFERS + 9000),
            target.address, first, last,
        )  # fmt: skip
    np.testing.assert_array_equal(cores.read(target), naive.compute_shift(a, b, rows, columns))


@settings(max_examples=40, deadline=None)
@given(lines, lines, sizes, sizes, st.sampled_from([Kind.FLOAT16, Kind.BFLOAT16]), st.data())
def test_sums_are_rounded_where_they_lie(rows, columns, m, n, kind, data):
    """A narrow target's bytes and as many beside them hold the sums; nothing else is touched."""
    cores, k = Cores(rows, columns), data.draw(sizes)
    a, b, bias = drawn(1, m, k), drawn(2, k, n), drawn(3, n)
    left, right = cores.place(a), cores.place(b)
    offset = cores.vector(bias) if data.draw(st.booleans()) else no_matrix()
    cores.next += data.draw(st.integers(0, 3))
    wide = cores.layout.size(cores.layout.rows(m), n, 4)
    target = cores.place(np.full((m, n), np.nan, np.float32), kind)
    before = cores.bytes[2:, :BUFFERS].copy()
    compute_shift(
        cores.bytes, cores.grid, left, np.arange(m), right, target, np.arange(m), offset,
        np.zeros(0, np.float32), cores.addresses(BUFFERS), cores.addresses(BUFFERS + 9000),
        target.address, 0, rows * columns,
    )  # fmt: skip
    wanted = naive.compute_shift(a, b, rows, columns) + (bias if offset.line.size else 0)
    changed = cores.bytes[2:, :BUFFERS] != before
    for own, address, size in zip(changed, target.address, wide, strict=True):
        assert not own[:address].any()
        assert not own[address + size :].any()
    cores.next = 50_000
    np.testing.assert_array_equal(cores.read(target), cores.read(cores.place(wanted, kind)))


@settings(max_examples=25, deadline=None)
@given(lines, lines, sizes, sizes, sizes, st.data())
def test_chosen_rows_are_weighed_and_added(rows, columns, m, k, n, data):
    """What experts do: some rows, to other rows, each with its share."""
    cores, a, b, c = Cores(rows, columns), drawn(1, m, k), drawn(2, k, n), drawn(3, m, n)
    left, right, target = cores.place(a), cores.place(b), cores.place(c)
    chosen = data.draw(st.permutations(range(m)))[: data.draw(st.integers(1, m))]
    goals = data.draw(st.permutations(range(m)))[: len(chosen)]
    shares = drawn(4, len(chosen))
    compute_shift(
        cores.bytes, cores.grid, left, np.array(chosen), right, target, np.array(goals),
        no_matrix(), shares, cores.addresses(BUFFERS), cores.addresses(BUFFERS + 9000),
        cores.addresses(BUFFERS + 18_001), 0, rows * columns,
    )  # fmt: skip
    wanted = c.copy()
    wanted[goals] += shares[:, None] * naive.compute_shift(a[chosen], b, rows, columns)
    np.testing.assert_array_equal(cores.read(target), wanted)


@settings(max_examples=25, deadline=None)
@given(lines, lines, sizes, sizes, sizes, st.booleans())
def test_row_vectors_have_the_bits_of_an_undivided_product(rows, columns, m, k, n, biased):
    cores, a, b, bias = Cores(rows, columns), drawn(1, m, k), drawn(2, k, n), drawn(3, n)
    left, right = cores.place(a), cores.place(b)
    offset = cores.vector(bias) if biased else no_matrix()
    products, every = np.full((m, n), np.nan, np.float32), np.arange(m)
    for column in range(columns):
        row_vectors(
            products, cores.bytes, cores.grid, left, every, right, offset, column, column + 1
        )
    wanted = numeric.product_add(np.zeros((m, n), np.float32), a, b)
    np.testing.assert_array_equal(products, wanted + bias if biased else wanted)


@settings(max_examples=25, deadline=None)
@given(lines, lines, st.integers(1, 9), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_rows_are_normed_turned_gated_and_added(rows, columns, m, heads, half, pairs):
    width = 2 * half
    x, y = drawn(1, m, heads * (width + 1)), drawn(2, m, heads * (width + 1))
    cores = Cores(rows, columns)
    one, two, weight = cores.place(x), cores.place(y), drawn(3, width)
    grouped = x.reshape(m, heads, width + 1).copy()

    target = cores.place(np.zeros_like(x))
    kept = groups_on_core(cores.layout.column_sizes(x.shape[1]), heads, x.shape[1])
    region_vector.norm(
        cores.bytes, cores.grid, one, target, cores.vector(weight), heads, width, 1e-5,
        cores.addresses(BUFFERS), kept,
    )  # fmt: skip
    sums = 4 * np.multiply.outer(cores.layout.rows(m).sizes, kept).ravel()
    for memory, size in zip(cores.bytes[2:], sums, strict=True):
        assert (memory[BUFFERS + size :] == 0xFF).all()
    wanted = grouped.copy()
    for head in range(heads):
        wanted[:, head, :width] = numeric.rms_norm(grouped[:, head, :width], weight, 1e-5)
    np.testing.assert_allclose(cores.read(target), wanted.reshape(m, -1), rtol=3e-6, atol=1e-7)

    angles = drawn(4, m, half)
    region_vector.rotate(
        cores.bytes, cores.grid, target, heads, np.cos(angles), np.sin(angles), pairs
    )
    wanted[..., 1:] = numeric.rotate(wanted[..., 1:], angles, pairs)
    np.testing.assert_allclose(cores.read(target), wanted.reshape(m, -1), rtol=1e-4, atol=3e-6)

    region_vector.gate(cores.bytes, cores.grid, one, two, target, int(Activation.SILU))
    gated = np.vectorize(numeric.silu)(x.astype(np.float64)) * y
    np.testing.assert_allclose(cores.read(target), gated, rtol=1e-5, atol=1e-7)

    region_vector.add(cores.bytes, cores.grid, one, two)
    np.testing.assert_array_equal(cores.read(two), y + x)


def cache_of(cores, tokens, vectors, width, seed):
    """KV of some tokens in slots that are shuffled over all cores."""
    count = cores.layout.region.cores
    slots = -(-tokens * vectors // count)
    places = np.random.default_rng(seed).permutation(count * slots)[: tokens * vectors]
    core, slot = np.divmod(places.reshape(tokens, vectors), slots)
    return Cache(
        int(Kind.FLOAT32), width, 1000, core + 2, slot, np.zeros(tokens, np.int64),
        np.full(2 + count, 60_000, np.int64), np.zeros((2 + count, slots), np.int64),
    )  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_ring_of_key_tiles_is_one_softmax(data):
    rows, columns = data.draw(lines), data.draw(lines)
    shared, group, width = data.draw(sizes), data.draw(st.integers(1, 2)), 3
    shared = shared % 3 + 1
    heads = shared * group
    units = -(-heads // columns) + data.draw(st.integers(0, 2))
    splits = units * columns // heads
    prefix, tokens = data.draw(st.integers(0, 20)), data.draw(st.integers(1, 20))
    window = data.draw(st.sampled_from([0, 4]))
    keys = prefix + tokens
    k, v = drawn(1, keys, shared, width), drawn(2, keys, shared, width)
    q = drawn(3, tokens, heads, width)
    cores = Cores(rows, columns)
    cache = cache_of(cores, keys, 2 * shared, width, data.draw(seeds))
    for first, values in ((0, k), (shared, v)):
        append(
            cores.bytes, cores.grid, cores.place(values.reshape(keys, -1)), 0, cache, 0, keys, first
        )
    query = cores.place(q.reshape(tokens, -1))
    target = cores.place(np.zeros((tokens, heads * width), np.float32))
    tile, query_tile = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    asked = Heads(
        heads, group, units, splits, width, width, 0, tile, query_tile, int(Kind.FLOAT32), 0.6,
        window, cores.addresses(BUFFERS),
    )  # fmt: skip
    block = Block(0, tokens, prefix)
    gather(cores.bytes, cores.grid, query, asked, block)
    pieces = [(at, min(tile, keys - at)) for at in range(0, keys, tile)]
    pieces = data.draw(st.permutations(pieces))
    for begin in range(0, len(pieces), rows * splits):
        first = np.zeros((rows, splits), np.int64)
        count = np.zeros_like(first)
        for place, (at, size) in enumerate(pieces[begin : begin + rows * splits]):
            first[divmod(place, splits)], count[divmod(place, splits)] = at, size
        faults = np.zeros((columns, 4), np.int64)
        ring_pass(
            cores.bytes, cores.grid, cache, asked, block, first, count, no_matrix(), 0, faults, 0,
            columns,
        )  # fmt: skip
        assert not faults.any()
    finish(cores.bytes, cores.grid, target, asked, block)
    positions = prefix + np.arange(tokens)
    for head in range(heads):
        wanted = numeric.attention(
            q[:, head], k[:, head // group], v[:, head // group], 0.6, positions, np.arange(keys),
            window or None,
        )  # fmt: skip
        found = cores.read(target)[:, head * width : (head + 1) * width]
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("code", [0, ABSENT, STALE, EARLY])
def test_wrong_reads_are_named(code):
    cores, values = Cores(2, 2), drawn(1, 5, 6)
    cache = cache_of(cores, 5, 2, 3, 0)
    write_cache(cores.bytes, cache, values)
    core, slot = int(cache.core[3, 1]), int(cache.slot[3, 1])
    if code == ABSENT:
        erase(cores.bytes, np.array([core]), np.array([slot]), cache.top, cache.tags, 12, 0xFF)
    elif code == STALE:
        cache.tags[core, slot] += 1
    elif code == EARLY:
        cache.arrived[3] = 8
    found, fault = np.empty((5, 6), np.float32), np.zeros(4, np.int64)
    read_cache(found, cores.bytes, cache, 7, fault)
    assert fault[:3].tolist() == ([code, core, 3] if code else [0, 0, 0])
    if code == ABSENT:
        assert np.isnan(found[3, 3:]).all()
        found[3, 3:] = values[3, 3:]
    np.testing.assert_array_equal(found, values)
