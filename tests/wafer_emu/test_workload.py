"""Workloads: generated trace files of each form, prefix reuse against loops, bad input."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wafer_emu.workload import MAX_TOKENS, Request, Workload
from wafer_kernels.errors import ConfigError, FileError

TRACES = Path(
    os.environ.get("WAFER_EMU_TRACES", Path(__file__).resolve().parents[2].parent / "shared/traces")
)


def test_single_and_equal() -> None:
    assert Workload.single(4096, 512).requests == (
        Request(index=0, tokens=4096, prefix_tokens=512),
    )
    assert Workload.single(4096, 512).requests[0].computed_tokens == 3584
    equal = Workload.equal(3, 100)
    assert [one.index for one in equal.requests] == [0, 1, 2]
    assert {one.tokens for one in equal.requests} == {100}


@pytest.mark.parametrize(
    ("requests", "tokens", "prefix"),
    [
        (0, 8, 0),
        (10**9, 8, 0),
        (1, 0, 0),
        (1, -1, 0),
        (1, MAX_TOKENS + 1, 0),
        (1, 8, 8),
        (1, 8, -1),
    ],
)
def test_counts_out_of_range(requests: int, tokens: int, prefix: int) -> None:
    with pytest.raises(ConfigError) as caught:
        Workload.equal(requests, tokens, prefix)
    assert caught.value.exit_code == 2
    assert "expected" in caught.value.message


def written(tmp_path: Path, text: str, name: str = "work load.txt") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_mooncake_lines(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 3000, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 250, "input_length": 700, "output_length": 5, "hash_ids": [0, 2]},
    ]
    text = "\n".join(json.dumps(line) for line in lines) + "\n\n"
    workload = Workload.from_file(written(tmp_path, text))
    assert workload.requests == (
        Request(index=0, tokens=700, arrival_seconds=0.25, prefix_blocks=(0, 2)),
        Request(index=1, tokens=1000, arrival_seconds=3.0, prefix_blocks=(0, 1)),
    )
    reused = workload.with_prefix_reuse()
    assert [one.prefix_tokens for one in reused.requests] == [0, 512]


def test_azure_csv_counts_from_its_first_request(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:04.0319600,3180,8\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
    )
    first, second = Workload.from_file(written(tmp_path, text)).requests
    assert (first.tokens, first.arrival_seconds) == (4808, 0.0)
    assert (second.tokens, second.arrival_seconds) == (3180, 0.052)


def test_plain_csv(tmp_path: Path) -> None:
    text = "\ufefftokens, prefix_tokens ,arrival_seconds\n10,2,0.5\n20,0,0\n"
    assert Workload.from_file(written(tmp_path, text)).requests == (
        Request(index=0, tokens=20),
        Request(index=1, tokens=10, prefix_tokens=2, arrival_seconds=0.5),
    )
    assert Workload.from_file(written(tmp_path, "tokens\n7\n")).requests[0].tokens == 7


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("tokens\n10\n0\n", ":3: tokens = 0: expected 1 to 16,777,216"),
        ("tokens\n1.5\n", ":2: tokens = '1.5': expected a whole number"),
        ("tokens\n\n16777217\n", ":3: tokens = 16777217"),
        ("tokens,prefix_tokens\n10,10\n", ":2: prefix_tokens = 10: expected 0 to 9"),
        ("tokens,arrival_seconds\n10,-1\n", ":2: arrival_seconds = -1.0"),
        ("tokens,arrival_seconds\n10,inf\n", ":2: arrival_seconds = inf"),
        ("tokens,arrival_seconds\n10,soon\n", ":2: arrival_seconds = 'soon': expected a number"),
        ("tokens,arrival_seconds\n10\n", ":2: arrival_seconds = ''"),
        ("tokens\n1,000\n", ":2: more fields than columns"),
        ("token\n10\n", ":1: columns token (did you mean tokens?)"),
        ("tokens,prefix\n10,1\n", "prefix_tokens"),
        ("tokens\n", ": 0 requests"),
        ("", ":1: columns none"),
        ("TIMESTAMP,ContextTokens\nyesterday,5\n", ":2: TIMESTAMP = 'yesterday'"),
        ('{"input_length": 5}\n{"input_length": 0}\n', ":2: tokens = 0"),
        ('{"input_length": 5.5}\n', ":1: input_length = 5.5: expected a whole number"),
        ('{"input_length": true}\n', ":1: input_length = True"),
        ('{"timestamp": "1", "input_length": 5}\n', ":1: timestamp = '1'"),
        ('{"timestamp": -1, "input_length": 5}\n', ":1: arrival_seconds = -0.001"),
        ('{"input_length": 5, "hash_ids": [1, "a"]}\n', ":1: hash_ids"),
        ('{"input_length": 5}\n{"input_len\n', ":2: not valid JSON"),
        ('{"output_length": 5}\n', ":1: expected an object with input_length"),
    ],
)
def test_what_is_wrong_has_file_and_line(tmp_path: Path, text: str, part: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        Workload.from_file(path)
    assert caught.value.message.startswith(str(path))
    assert part in caught.value.message


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be read"):
        Workload.from_file(tmp_path / "none.csv")


def test_compressed_and_head(tmp_path: Path) -> None:
    workload = Workload.from_file(written(tmp_path, "tokens,arrival_seconds\n5,0\n6,8\n7,16\n"))
    fast = workload.compressed(4)
    assert [one.arrival_seconds for one in fast.requests] == [0.0, 2.0, 4.0]
    assert [one.tokens for one in fast.head(2).requests] == [5, 6]
    for factor in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="compression factor"):
            workload.compressed(factor)
    for count in (0, 4):
        with pytest.raises(ConfigError, match="there are 1 to 3"):
            workload.head(count)


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.integers(1, 40), st.lists(st.integers(0, 5), max_size=10)),
        min_size=1,
        max_size=8,
    )
)
def test_prefix_reuse_against_loops(prompts: list[tuple[int, list[int]]]) -> None:
    workload = Workload(
        tuple(
            Request(index=i, tokens=tokens, prefix_blocks=tuple(blocks))
            for i, (tokens, blocks) in enumerate(prompts)
        ),
        "made up",
    )
    reused = workload.with_prefix_reuse(block_tokens=4).requests
    for i, (tokens, blocks) in enumerate(prompts):
        earlier = [block for _, others in prompts[:i] for block in others]
        resident = 0
        for block in blocks:
            if block not in earlier:
                break
            resident += 4
        assert reused[i].prefix_tokens == min(resident, tokens - 1)
        assert reused[i].computed_tokens >= 1


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"no request traces at {TRACES} (WAFER_EMU_TRACES)")
def test_real_traces() -> None:
    mooncake = Workload.from_file(TRACES / "mooncake_conversation.jsonl")
    assert len(mooncake.requests) == 12_031
    assert max(one.tokens for one in mooncake.requests) == 126_195
    lengths = sorted(one.tokens for one in mooncake.requests)
    assert lengths[len(lengths) // 2] == 6_909
    assert 3500 < mooncake.requests[-1].arrival_seconds < 3600
    resident = sum(one.prefix_tokens for one in mooncake.with_prefix_reuse().requests)
    assert 0.3 < resident / sum(lengths) < 0.45
    assert len(Workload.from_file(TRACES / "azure_llm_2023_code.csv").requests) == 8_819
