"""Bytes of one core of a stage, tensor by tensor, from what lives when."""


def working_bytes(operation, height, width, sizes):
    """Buffers of one operation on a core with parts ``height(total)`` and ``width(total)``."""
    kind = type(operation).__name__
    if kind in ("Product", "Experts"):
        row_sums = width(operation.target.columns) * 4
        if kind == "Product" and operation.last_row:
            return row_sums
        inner, slices = operation.source.columns, max(sizes["rows"], sizes["columns"])
        depth = inner // slices + (1 if inner % slices else 0)
        # a token never chooses an expert twice, so one expert has at most all tokens
        rows = min(operation.source.rows, operation.target.rows)
        arriving_a = height(rows) * depth * sizes["element"]
        arriving_b = width(operation.target.columns) * depth * sizes["weight"]
        sums = height(rows) * row_sums
        if kind == "Product":  # the target's own bytes, which are live anyway, hold some of them
            sums -= height(rows) * width(operation.target.columns) * sizes["element"]
        return max(arriving_a + arriving_b + sums, row_sums)
    if kind == "Norm":
        total = operation.source.columns
        group, own = total // operation.groups, width(total)
        met = [
            len({column // group for column in range(first, first + own)})
            for first in range(total - own + 1)
        ]
        return height(operation.source.rows) * max(met) * 4
    if kind == "Attention":
        most = 0
        for tiling in sizes["tilings"]:
            queries = height(tiling["query_tiles"]) * tiling["query_tile"]
            most = max(most, tiling["key_buffer"] + queries * tiling["query"])
        return most
    return 0


def peak_bytes(operations, height, width, sizes):
    """Most bytes at any operation: tensors named before (or now) and again (or now), and buffers.

    The residual stream is always there.
    """
    peak = 0
    for now, operation in enumerate(operations):
        before = {tensor for each in operations[: now + 1] for tensor in each.tensors()}
        after = {tensor for each in operations[now:] for tensor in each.tensors()}
        always = {
            tensor for each in operations for tensor in each.tensors() if tensor.name == "stream"
        }
        live = sum(
            height(tensor.rows) * width(tensor.columns) * sizes["element"]
            for tensor in (before & after) | always
        )
        peak = max(peak, live + working_bytes(operation, height, width, sizes))
    return peak
