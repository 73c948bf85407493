"""Grouped quantization: blocks restart at each group, groups may be empty, unused scale rows never matter."""

import pytest
import torch

from mindspeed_lowp import ops
from mindspeed_lowp.ops import layout
from tests.ops.data import ALGORITHMS, FLOATS, FORMATS, assert_same_bytes, normal, wide_range

GROUPS = {
    "one": [200],
    "multiples of 64": [64, 192, 200],
    "not multiples of 32": [1, 45, 78, 200],
    "first empty": [0, 0, 100, 200],
    "last empty": [90, 200, 200, 200],
    "only the last": [0, 0, 0, 200],
}


def rows_in_use(ends: list[int]) -> list[int]:
    rows, start = [], 0
    for group, end in enumerate(ends):
        first = start // 64 + group
        rows += range(first, first - (start - end) // 64)
        start = end
    return rows


@pytest.mark.parametrize("ends", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("alg", ALGORITHMS)
@pytest.mark.parametrize("info", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_each_group_is_quantized_by_itself(dtype, info, alg, ends):
    x = wide_range((200, 70), dtype)
    y, mxscale = ops.grouped_dynamic_mx_quant(
        x, torch.tensor(ends, dtype=torch.int32), dst_type=info.dtype, scale_alg=alg
    )
    assert mxscale.shape == (200 // 64 + len(ends), 70, 2)
    start = 0
    for group, end in enumerate(ends):
        codes, scale = ops.dynamic_mx_quant(x[start:end], axis=0, dst_type=info.dtype, scale_alg=alg)
        first = start // 64 + group
        assert_same_bytes(y[start:end], codes)
        assert_same_bytes(mxscale[first : first + len(scale)], scale)
        start = end
    unused = sorted(set(range(len(mxscale))) - set(rows_in_use(ends)))
    assert not mxscale[unused].any()


def test_all_groups_empty():
    y, mxscale = ops.grouped_dynamic_mx_quant(
        torch.empty(0, 8).bfloat16(), torch.tensor([0, 0]), dst_type=torch.float8_e4m3fn
    )
    assert y.shape == (0, 8)
    assert mxscale.tolist() == torch.zeros(2, 8, 2).tolist()


@pytest.mark.parametrize("ends", GROUPS.values(), ids=GROUPS)
def test_poisoned_unused_rows_change_no_value_and_no_product(ends):
    group_list = torch.tensor(ends)
    a, a_scale = ops.grouped_dynamic_mx_quant(normal((200, 40)), group_list, dst_type=torch.float8_e4m3fn)
    b, b_scale = ops.grouped_dynamic_mx_quant(
        normal((200, 24), seed=1), group_list, dst_type=torch.float8_e5m2
    )

    def results():
        (products,) = ops.grouped_matmul(
            [a.t()],
            [b],
            scale=[b_scale],
            per_token_scale=[a_scale.transpose(0, 1)],
            group_list=group_list,
            split_item=3,
            group_type=2,
            output_dtype=torch.float32,
        )
        return ops.grouped_anti_mx_quant(a, a_scale, group_list, dst_type=torch.float32), products

    clean = results()
    unused = sorted(set(range(len(a_scale))) - set(rows_in_use(ends)))
    for scale in (a_scale, b_scale):
        scale[unused] = 0xFF
        start = 0
        for group, end in enumerate(ends):
            if (end - start) % 64 in range(1, 33):  # the second byte of the group's last pair is padding
                scale[layout.group_scale_rows(group, start, end).start + (end - start) // 64, :, 1] = 0xFF
            start = end
    for before, after in zip(clean, results(), strict=True):
        assert_same_bytes(after, before)


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([10, 100], r"group_index=\[10, 100\] must end with the number of rows of x, 200"),
        ([10, 300], r"group_index=\[10, 300\] covers 300 rows, but the tensor has 200"),
        ([50, 10, 200], r"group_index=\[50, 10, 200\]: ends must not decrease"),
        ([-1, 200], r"group_index=\[-1, 200\]: ends must not decrease"),
    ],
)
def test_a_wrong_group_index_is_refused(ends, message):
    with pytest.raises(ValueError, match=message):
        ops.grouped_dynamic_mx_quant(normal((200, 8)), torch.tensor(ends), dst_type=torch.float8_e4m3fn)
