"""dequantize: every code and scale as its format defines them, whatever the sizes and strides."""

import pytest
import torch

import tigon

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
KINDS = ("e4m3", "int8", "int4", "e2m1")
SIZES = ((8, 64), (67, 96), (37, 100), (130, 257), (1, 1))


def values_of(codes, kind, columns):
    """What codes stand for in float32, by lookups in plain PyTorch."""
    if kind == "e4m3":
        return codes.float()
    if kind == "int8":
        return codes.view(torch.int8).float()
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)[..., :columns].long()
    return E2M1.to(codes.device)[nibbles] if kind == "e2m1" else nibbles.float() - 8


def scales_in(dtype, shape, device):
    if dtype in (E8M0, torch.uint8):
        exponents = torch.randint(100, 150, shape, device=device, dtype=torch.uint8)
        return exponents.view(dtype)
    return (torch.rand(shape, device=device) + 0.1).to(dtype)


def wide(scales):
    return (scales.view(E8M0) if scales.dtype == torch.uint8 else scales).float()


def spread(grid, block, rows, columns):
    return grid.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :columns]


def blocks_of(n, block):
    return -(-n // block)


def make(kind, rows, columns, device):
    width = columns if kind in ("e4m3", "int8") else (columns + 1) // 2
    codes = torch.randint(0, 256, (rows, width), device=device, dtype=torch.uint8)
    return codes.view(E4M3) if kind == "e4m3" else codes


@pytest.mark.parametrize("dtype", (F32, BF16, F16))
@pytest.mark.parametrize("kind", KINDS)
def test_as_the_format_defines_it(kind, dtype, device):
    for rows, columns in SIZES:
        for block in ((1, 32), (128, 128), (1, 16), (3, 48), (3, 5), (1, 1 << 40)):
            for of in (F32, BF16, F16, E4M3, E8M0, torch.uint8):
                codes = make(kind, rows, columns, device)
                shape = blocks_of(rows, block[0]), blocks_of(columns, block[1])
                scales = scales_in(of, shape, device)
                got = tigon.dequantize(codes, scales, kind, block=block, columns=columns, dtype=dtype)
                full = spread(wide(scales), (block[0], min(block[1], columns)), rows, columns)
                want = (values_of(codes, kind, columns) * full).to(dtype)
                assert torch.equal(got.nan_to_num(99), want.nan_to_num(99)), (rows, columns, block, of)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_divisor_strides_and_stacks(kind, device):
    codes = make(kind, 64, 96, device)
    scales, zeros = scales_in(BF16, (64, 3), device), torch.randint(-8, 8, (64, 3), device=device).float()
    divisor = torch.tensor([37.0], device=device)
    full = spread(scales.float() / divisor, (1, 32), 64, 96)
    want = (values_of(codes, kind, 96) - spread(zeros, (1, 32), 64, 96)) * full
    options = {"zeros": zeros, "divisor": divisor, "dtype": F32}
    got = tigon.dequantize(codes, scales, kind, **options)
    assert torch.equal(got.nan_to_num(99), want.nan_to_num(99))
    padded = torch.zeros(64, 101, dtype=torch.uint8, device=device).view(codes.dtype)[
        :, 1 : 1 + codes.shape[1]
    ]
    padded.copy_(codes)
    apart = scales.T.contiguous().T
    again = tigon.dequantize(padded, apart, kind, **options)
    assert torch.equal(again.nan_to_num(99), want.nan_to_num(99))
    stack = tigon.dequantize(
        codes.unflatten(0, (4, 16)),
        scales.unflatten(0, (4, 16)),
        kind,
        zeros=zeros.unflatten(0, (4, 16)),
        divisor=divisor,
        dtype=F32,
    )
    assert torch.equal(stack.flatten(0, 1).nan_to_num(99), want.nan_to_num(99))


@pytest.mark.parametrize("kind", KINDS)
def test_every_code(kind, device):
    count = 256 if kind in ("e4m3", "int8") else 512
    codes = torch.arange(256, dtype=torch.uint8, device=device)[None]
    codes = codes.view(E4M3) if kind == "e4m3" else codes
    for scale in (1.0, 0.3):
        scales = torch.tensor(scale, device=device)
        got = tigon.dequantize(codes, scales, kind, dtype=F32)
        want = values_of(codes, kind, count) * scales
        assert torch.equal(got.nan_to_num(999), want.nan_to_num(999))
        assert torch.equal(got.signbit() & (got == 0), want.signbit() & (want == 0))


def test_every_e8m0_scale(device):
    exponents = torch.arange(256, dtype=torch.uint8, device=device)[:, None]
    codes = torch.full((256, 8), 0x22, dtype=torch.uint8, device=device)
    got = tigon.dequantize(codes, exponents, "e2m1", dtype=F32)
    assert torch.equal(got.nan_to_num(7), exponents.view(E8M0).float().expand(256, 16).nan_to_num(7))


def test_gpt_oss_blocks(device):
    """A checkpoint's [E, 2I, G, 16] bytes and [E, 2I, G] exponents, as transformers unpacks them."""
    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8, device=device)
    scales = torch.randint(110, 130, (2, 6, 3), dtype=torch.uint8, device=device)
    got = tigon.dequantize(blocks.flatten(-2), scales, "e2m1")
    parts = [E2M1.to(device, BF16)[(blocks >> shift & 15).long()] for shift in (0, 4)]
    want = torch.ldexp(torch.stack(parts, -1).flatten(-2), scales.int()[..., None] - 127).flatten(-2)
    assert torch.equal(got, want)


CODES = torch.zeros(4, 8, dtype=torch.uint8)
REFUSED = {
    "no kind": ((CODES, torch.ones(4, 1)), {}, "kind must be given with codes of torch.uint8"),
    "dtype": ((CODES, torch.ones(4, 1), "int8"), {"dtype": torch.float64}, "dtype must be one of"),
    "grid": ((CODES, torch.ones(3, 1), "int8"), {}, r"scales \[3, 1\] do not divide the weight \[4, 8\]"),
    "sizes": ((CODES, torch.ones(4, 2), "int8"), {"block": (1, 8)}, r"scales must be \[4, 1\], got \[4, 2\]"),
    "block": ((CODES, torch.ones(4, 2), "int8"), {"block": (0, 8)}, "rows of block must be >= 1"),
    "zeros": ((CODES, torch.ones(4, 2), "int8"), {"zeros": torch.ones(4, 3)}, r"zeros must be \[4, 2\]"),
    "scales": ((CODES, torch.ones(4, 1).double(), "int8"), {}, "scales must be"),
    "module": ((torch.nn.Linear(2, 2),), {}, "a quantised Linear that tigon reads, got Linear"),
    "float": ((torch.ones(4, 8), torch.ones(4, 1), "int8"), {}, "source must hold codes of int8"),
    "e5m2": (
        (CODES.view(torch.float8_e5m2), torch.ones(4, 1), "e4m3"),
        {},
        "codes of e4m3, got torch.float8_e5m2",
    ),
    "nothing": ((CODES,), {}, "scales must be a tensor"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_in_words(what):
    args, options, words = REFUSED[what]
    with pytest.raises(tigon.Error, match=r"\[dequantize\] .*" + words):
        tigon.dequantize(*args, **options)


def test_compiled_and_empty(device):
    codes, scales = make("e4m3", 32, 64, device), torch.rand(32, 1, device=device)
    compiled = torch.compile(tigon.dequantize, backend="aot_eager", fullgraph=True)
    got = compiled(codes, scales)
    assert torch.equal(got.nan_to_num(9), tigon.dequantize(codes, scales).nan_to_num(9))
    assert tigon.dequantize(codes[:0], scales[:0], block=(1, 64)).shape == (0, 64)
