import pytest

from mocap import serving

TOKENS = 131_072


def test_sglang_golden_sizes():
    model = serving.Quadratic(2 / TOKENS, 1.0, 5.0)  # a L / b = 2
    expected = (
        "12288 10496 9472 8832 8320 7936 7616 7360 7168 6976 6848 6720 6592 6464 6400 6272 5312"
    )
    sizes = serving.sglang(TOKENS, 12_288, model, 64, smooth=0.65)
    assert sizes == list(map(int, expected.split()))
    rough = serving.sglang(TOKENS, 12_288, model, 64, smooth=1.0)
    assert len(rough) == 28
    assert rough[-1] == 128  # the tiny tail that its users complain about


def test_sglang_keeps_fixed_chunks_without_a_rising_square_term():
    model = serving.Quadratic(0.0, 1.0, 5.0)
    assert serving.sglang(10_000, 4096, model, 64) == [4096, 4096, 1808]


def test_sglang_floor_and_prefix():
    steep = serving.Quadratic(1.0, 0.0, 0.0)
    sizes = serving.sglang(1_000_000, 4096, steep, 64, smooth=1.0, prefix_tokens=500_000)
    assert set(sizes[:-1]) == {1024}


def test_profile_sizes_of_the_published_profile():
    sizes = serving.profile_sizes(12_288, 128)
    assert (sizes[0], sizes[1], len(sizes)) == (15_360, 15_240, 128)
    assert min(serving.profile_sizes(3, 128)) == 1


def test_published_times_are_quadratic():
    """SGLang blog 2026-01-15: Qwen3-235B, PP8, at 1, 2, 4 and 8 times 128K tokens, in seconds."""
    seconds = {1: 10.54, 2: 32.68, 4: 114.33, 8: 420.91}
    model = serving.fit_quadratic(lambda length, _: seconds[length], [1, 2, 8])
    assert model(4) == pytest.approx(seconds[4], rel=0.01)  # predicted from the other three
    assert model.square > 0
    assert model.linear > 0


def test_seq1f1b_golden_sizes():
    """24 layers, hidden 4096, 32 heads of 128, FFN 16384, vocabulary 32000, 2 tensor ranks."""
    vocabulary, head, heads, hidden, ffn, layers = 32_000, 128, 32, 4096, 16_384, 24
    linear = 4 * hidden * vocabulary
    linear += layers * (8 * hidden * heads * head + 4 * hidden * ffn)
    causal = layers * (4 * head + 3) * heads
    assert serving.seq1f1b(16_384, 4, linear, causal, 2) == [4930, 4238, 3776, 3440]


def test_seq1f1b_without_attention_is_uniform():
    assert serving.seq1f1b(1000, 4, 7.0, 0.0) == [250] * 4


def test_chunk_model_is_recovered_from_its_samples():
    model = serving.ChunkModel(3e-6, 2e-3, 4e-4, 5.0)
    samples = [(c, p) for c in (1000, 3000, 8000) for p in (0, 5000, 60_000)]
    assert serving.fit_chunk_model(model, samples) == pytest.approx(model, rel=1e-6)
    assert model(100, 0) == pytest.approx(5.0 + 0.2 + 0.03)


def test_atom_chunks_take_equal_time():
    model = serving.ChunkModel(1e-8, 2e-3, 1e-5, 5.0)
    sizes = serving.atom(TOKENS, 12_288, model)
    prefix = 0
    for size in sizes[:-1]:
        assert model(size, prefix) == pytest.approx(model(12_288, 0), rel=1e-3)
        prefix += size
    assert sum(sizes) == TOKENS
    assert sizes[0] == 12_288


def test_atom_keeps_a_floor_where_no_chunk_is_fast_enough():
    assert serving.atom(4096, 1024, serving.ChunkModel(0.0, 1.0, 10.0, 0.0), 16)[1:] == [256] * 12


def test_vllm_ascend_balances_better_once_it_has_history():
    """A fixed cost that whole prefills hide: the model fitted on chunks equalises their times."""

    def cost(chunk, prefix):
        return 50.0 + 1e-5 * (chunk + prefix) + 1e-7 * chunk * (chunk + prefix)

    model = serving.fit_quadratic(cost, serving.profile_sizes(12_288, 64))
    sizes = serving.vllm_ascend(TOKENS, 12_288, model, cost, 128, smooth=1.0, least_tokens=256)
    prefixes = [sum(sizes[:i]) for i in range(len(sizes))]
    later = list(zip(sizes, prefixes, strict=True))[5:-1]
    assert later
    assert all(size % 128 == 0 for size in sizes[:-1])
    for size, prefix in later:
        assert cost(size, prefix) == pytest.approx(cost(12_288, 0), rel=0.03)


def test_vllm_ascend_keeps_its_least_chunk():
    model = serving.Quadratic(1.0, 0.0, 0.0)
    sizes = serving.vllm_ascend(30_000, 8192, model, lambda c, p: c * (2 * p + c), 64)
    assert min(sizes[:-1]) >= 4096
