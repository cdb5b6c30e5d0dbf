"""The CUDA kernels' launch parameters, which need no GPU to be computed."""

import numpy as np
import pytest
from llmserve import _core_testing

launch = _core_testing.cuda_launch

WIDTHS = [1, 31, 32, 33, 64, 127, 128, 896, 1024, 4096, 152_064]
ROWS = [1, 2, 7, 8, 9, 63, 64, 65, 512, 8192, 131_072]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_gets_whole_warps_and_no_idle_one(width):
    for limit in (256, launch.MAX_THREADS):
        threads = launch.row_threads(width, limit)
        assert threads % 32 == 0
        assert 32 <= threads <= limit
        assert threads - 32 < width


def test_elementwise_kernels_get_a_block_at_least_and_never_more_than_there_is_work():
    for n in (1, 255, 256, 257, 10**6, 2**40):
        blocks = launch.elementwise_blocks(n, 256)
        assert 1 <= blocks <= min(4096, -(-n // 256))


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_the_tiles_of_a_product_cover_it_exactly_once(rows, columns):
    tile_rows, tile_columns, x, y = launch.gemm(rows, columns)
    assert (x - 1) * tile_columns < columns <= x * tile_columns
    assert (y - 1) * tile_rows < rows <= y * tile_rows
    assert y <= launch.MAX_GRID_YZ


def test_few_rows_use_narrow_tiles_that_spread_the_weight_over_more_blocks():
    assert launch.gemm(1, 4096)[:2] == launch.gemm(8, 4096)[:2]
    assert launch.gemm(8, 4096)[2] > launch.gemm(9, 4096)[2]


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_tensor_core_tiles_cover_a_product_within_the_limits_of_every_gpu(rows, columns):
    tile_rows, tile_columns, threads, shared, blocks = launch.mma(rows, columns)
    assert blocks == -(-rows // tile_rows) * -(-columns // tile_columns)
    assert -(-rows // tile_rows) <= launch.MAX_GRID_YZ
    assert threads <= launch.MAX_THREADS
    assert shared <= 99 * 1024  # what a block may ask for on compute capability 8.6 and 8.9


def test_tensor_core_tiles_grow_with_the_product():
    assert launch.mma(1, 4096)[:2] == launch.mma(16, 4096)[:2] == (16, 32)
    assert launch.mma(64, 4096)[:2] == (64, 64)  # large ones would be too few
    assert launch.mma(8192, 4096)[:2] == (128, 128)


@pytest.mark.parametrize("depth", [8, 64, 520, 1024, 1032, 1544, 2048, 2056, 4096, 14_336, 53_248])
def test_the_splits_of_a_product_by_wgmma_cover_k_and_none_is_empty(depth):
    splits, steps = launch.wgmma_splits(depth)
    width = steps * launch.WGMMA_DEPTH
    assert 1 <= splits <= 4
    assert (splits - 1) * width < depth <= splits * width


@pytest.mark.parametrize("depth", [64, 1024, 1544, 4096, 14_336])
@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_a_product_by_wgmma_fits_an_sm_and_what_it_passes_on_its_memory(rows, columns, depth):
    groups, wide, sharing, tiles, tile_bytes, stages, shared, threads, blocks = launch.wgmma_form(
        rows, columns, depth
    )
    assert (groups, wide) in {(1, 8), (1, 16), (1, 32), (1, 64), (2, 32), (2, 64), (2, 128)}
    assert tiles == -(-rows // wide) * -(-columns // (64 * groups))
    splits = launch.wgmma_splits(depth)[0]
    assert splits % sharing == 0
    if sharing > 1:
        assert tiles * splits * tile_bytes <= launch.WGMMA_PARTIAL_BYTES
        assert tiles * groups <= launch.WGMMA_ARRIVALS
    assert shared <= 227 * 1024  # what a block may ask for on compute capability 9.0
    assert blocks * (shared + 2048) <= 228 * 1024  # with a KB that is the driver's
    assert threads <= launch.MAX_THREADS
    assert stages >= 4


def test_a_librarys_algorithms_are_chosen_for_powers_of_two():
    buckets = [launch.gemm_bucket(m) for m in range(1, 20_000)]
    assert buckets == sorted(buckets)
    assert sorted(set(buckets)) == [2**i for i in range(4, 14)]
    assert all(m <= bucket < max(2 * m, 17) for m, bucket in enumerate(buckets[:8192], 1))


@pytest.mark.parametrize("columns", WIDTHS)
def test_the_warps_of_a_matrix_vector_product_cover_its_columns_exactly_once(columns):
    each, blocks = launch.gemv(columns)
    covered = each * launch.GEMV_WARPS
    assert (blocks - 1) * covered < columns <= blocks * covered
    # A lane writes one output of the most rows that a warp takes.
    assert each * launch.GEMV_MAX_ROWS <= 32


def test_few_rows_get_the_smallest_kernel_that_holds_them():
    rows = range(1, launch.GEMV_MAX_ROWS + 1)
    assert [launch.gemv_rows(m) for m in rows] == [1, 2, 4, 4, 8, 8, 8, 8]


@pytest.mark.parametrize("columns", WIDTHS)
def test_the_warps_that_share_k_fit_a_block_and_their_sums_its_memory(columns):
    for is_gated in (False, True):
        warps = launch.mma_gemv_warps(columns, is_gated)
        assert warps in (4, 16)  # what the kernels are made for
        slots = 8 if warps == 16 else 32
        assert launch.mma_gemv_shared_bytes(warps, slots) <= launch.MAX_SHARED_BYTES


@pytest.mark.parametrize("heads", [3, 4, 5, 32, 80])
def test_every_head_of_queries_keys_and_values_has_a_warp(heads):
    blocks = launch.qkv_blocks(heads)
    assert (blocks - 1) * launch.QKV_WARPS < heads <= blocks * launch.QKV_WARPS
    assert launch.qkv_shared_bytes(launch.QKV_MAX_WIDTH) <= launch.MAX_SHARED_BYTES


def test_only_products_of_few_rows_norm_them_on_the_way():
    assert 1 <= launch.GEMV_NORM_MAX_ROWS <= launch.GEMV_MAX_ROWS


@pytest.mark.parametrize("dim", [4, 33, 64, 80, 96, 128, 256, 576])
def test_heads_of_every_usual_width_fit_the_shared_memory(dim):
    assert launch.attention_fits(dim, dim, 64)
    assert launch.attention_shared_bytes(dim, dim, 64) == (2 * dim + 64) * 4


@pytest.mark.parametrize("width", [64, 80, 96, 128, 256])
def test_attention_by_tensor_cores_fits_the_shared_memory_of_an_a100(width):
    assert launch.tiled_fits(width, 163 * 1024)
    assert not launch.tiled_fits(width, launch.MAX_SHARED_BYTES // 2)
    # Decoding: several warps on an SM, each with its own.
    assert 2 * launch.tiled_split_bytes(width, 1, False) <= 164 * 1024


@pytest.mark.parametrize("width", [64, 80, 96, 128])
def test_a_warp_for_each_unit_fits_the_shared_memory_of_an_a100(width):
    assert launch.has_wide_kernel(width)
    for is_f8 in (False, True):
        assert launch.tiled_split_bytes(width, 4, is_f8) <= 163 * 1024


def test_widths_without_a_kernel_do_not_fit():
    assert not any(launch.tiled_fits(width, 2**20) for width in (33, 72, 112, 512))


def test_rows_of_every_sequence_are_covered_and_few_of_them_split_over_the_context():
    row_tiles, spans, split_rows, partials = launch.tiled_plan(
        [(4, 1000), (0, 50), (17, 20), (16, 300), (2000, 4000)], 128
    )
    assert (row_tiles - 1) * 64 < 2000 <= row_tiles * 64
    assert (spans - 1) * launch.TILED_SPAN < 1000 <= spans * launch.TILED_SPAN
    assert split_rows == 16
    assert partials == spans * split_rows
    # One span has nothing to merge.
    assert launch.tiled_plan([(8, launch.TILED_SPAN)], 64) == (0, 1, 8, 0)
    assert launch.tiled_plan([], 64) == (0, 0, 0, 0)


@pytest.mark.parametrize("width", [64, 128])
def test_wgmma_has_a_block_an_sm_and_takes_all_rows_of_long_sequences_alone(width):
    assert launch.wgmma_bytes(width) <= 227 * 1024
    row_tiles, split_rows, tiles = launch.wgmma_plan([8, 127, 16, 4096, 128], 4, width)
    assert (row_tiles - 1) * 64 < 127 <= row_tiles * 64
    assert split_rows == 16
    assert (tiles - 1) * launch.WGMMA_ROWS < 4096 <= tiles * launch.WGMMA_ROWS
    # Eight tokens, as a step with guesses has them, are never wgmma's.
    assert launch.wgmma_plan([8 * 16], 16, width)[2] == 0
    assert launch.wgmma_plan([9 * 16], 16, width)[2] == 2


def test_a_warp_takes_as_many_spans_as_leave_a_gpu_enough_of_them():
    one, two, enough, every = range(4)
    assert [launch.tiled_walk(choice, 8, 2048) for choice in (one, two, enough, every)] == [
        1,
        2,
        8,
        8,
    ]
    assert launch.tiled_walk(enough, 4, 512) == 3  # 1,024 warps
    assert launch.tiled_walk(enough, 16, 8) == 1
    assert [launch.tiled_walk(choice, 1, 9) for choice in (two, enough, every)] == [1, 1, 1]
    assert [launch.tiled_walk(choice, 0, 9) for choice in (two, enough, every)] == [1, 1, 1]


def test_what_split_rows_pass_on_is_bounded_by_the_largest_step():
    rng = np.random.default_rng(0)
    for _ in range(300):
        max_sequences, max_context = int(rng.integers(1, 300)), int(rng.integers(1, 140_000))
        kv_heads, group = int(rng.integers(1, 33)), int(rng.integers(1, 17))
        width = int(rng.choice([64, 80, 96, 128, 256]))
        bound = launch.max_partial_bytes(max_sequences, max_context, kv_heads, group, width)
        sequences = [
            (group * int(rng.integers(1, 40)), int(rng.integers(1, max_context + 1)))
            for _ in range(int(rng.integers(1, max_sequences + 1)))
        ]
        at_once, num_bytes = launch.partial_parts(sequences, kv_heads, width)
        assert 1 <= at_once <= len(sequences)
        assert num_bytes <= bound
        assert num_bytes <= launch.MAX_PARTIAL_BYTES or at_once == 1


def test_a_full_batch_of_4096_tokens_is_split_in_one_part():
    at_once, num_bytes = launch.partial_parts([(4, 4096)] * 256, 8, 128)
    assert (at_once, num_bytes) == (256, 256 * 8 * 16 * 4 * (128 + 2) * 4)
    assert launch.partial_parts([(4, 8192)] * 256, 8, 128)[0] == 252


def test_groups_that_no_warp_holds_pass_nothing_on():
    assert launch.max_partial_bytes(256, 4096, 8, launch.TILED_ROWS + 1, 128) == 0


def test_heads_that_do_not_fit_are_found_out():
    assert not launch.attention_fits(8192, 8192, 64)


@pytest.mark.parametrize(("value", "expected"), [(0, 256), (1, 1), (4, 4), (48, 16), (512, 256)])
def test_alignment_is_the_largest_power_of_two_that_divides(value, expected):
    assert launch.alignment_bytes(value) == expected


SHARED_BYTES = (101376, 166912, 232448)  # of compute capability 8.9, 8.0 and 9.0


@pytest.mark.parametrize("shared", SHARED_BYTES)
@pytest.mark.parametrize("is_f8", [False, True])
def test_attention_by_columns_fits_the_shared_memory_of_a_gpu(shared, is_f8):
    for widths in ((576, 512), (320, 256), (192, 128), (16, 512), (576, 16)):
        for is_latent in (False, True):
            for rows in (1, 16, 17, 4096):
                tiles, ring, num_bytes = launch.column_form(*widths, is_latent, is_f8, rows, shared)
                assert num_bytes <= shared
                assert tiles in ((0, 1) if rows <= 16 else (0, 1, 2))
                assert ring in ((0, 2) if is_f8 else (0, 2, 4, 5, 6))


def test_latents_of_576_have_a_form_on_every_gpu_with_tensor_cores_of_bf16():
    forms = [launch.column_form(576, 512, True, False, 128, n)[:2] for n in SHARED_BYTES]
    assert forms == [(1, 2), (1, 4), (2, 4)]
    codes = [launch.column_form(576, 512, True, True, 128, n)[:2] for n in SHARED_BYTES]
    assert codes == [(0, 0), (1, 2), (2, 2)]  # on 8.9 the plain kernel
    for widths in ((577, 512), (592, 512), (576, 528), (20, 16), (16, 4)):
        assert launch.column_form(*widths, True, False, 1, SHARED_BYTES[-1]) == (0, 0, 0)
    assert launch.column_form(120, 120, False, False, 1, SHARED_BYTES[0])[1] > 0
    assert launch.column_form(120, 120, False, True, 1, SHARED_BYTES[0])[1] == 0  # rows of codes


def test_what_attention_by_columns_passes_on_is_bounded_and_known_at_load():
    rng = np.random.default_rng(0)
    for _ in range(200):
        kv_heads, width = int(rng.choice([1, 2, 8])), int(rng.choice([64, 256, 512]))
        context, count = int(rng.integers(1, 300_000)), int(rng.integers(1, 300))
        sequences = [
            (int(rng.integers(0, 1400)), int(rng.integers(1, context + 1))) for _ in range(count)
        ]
        bound = launch.max_column_bytes(count, context, kv_heads, width)
        at_once, slots, num_bytes = launch.column_parts(sequences, kv_heads, width)
        assert 1 <= at_once <= count
        assert num_bytes <= bound
        split = [n for rows, n in sequences if 0 < rows <= launch.COLUMN_SPLIT_ROWS]
        if split:
            assert -(-max(split) // launch.COLUMN_STRETCH) <= slots
            assert slots <= max(-(-max(split) // launch.TILED_SPAN), 1)
    one = launch.max_column_bytes(1, 2**20, 1, 512)
    assert launch.MAX_PARTIAL_BYTES < one < 5 * launch.MAX_PARTIAL_BYTES
