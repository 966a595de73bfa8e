import pytest
import torch
from paths import GOLDEN
from safetensors.torch import load_file

from calib.demo.delta import UnitLowerInverse, chunked_delta, sequential_delta
from calib.demo.fakequant import Linear, WeightQuantizer
from calib.demo.generate import greedy
from calib.demo.storage import load_target
from edge_dflash.training.drafter import fake_fp8
from edge_dflash.weights.quantize import dequantize, fused_group, quantize_nvfp4

PROMPTS = ("p0", "p1", "p2")


@pytest.fixture(scope="module")
def golden():
    return load_file(str(GOLDEN / "golden_qwen3_5.safetensors"))


@pytest.fixture(scope="module")
def target():
    return load_target(GOLDEN / "qwen3_5-tiny").requires_grad_(False)


def random_delta(batch, rows, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    q, k = (torch.nn.functional.normalize(normal(batch, rows, 2, 16), dim=-1) for _ in range(2))
    g, beta = -normal(batch, rows, 6).abs() * 0.3, torch.sigmoid(normal(batch, rows, 6))
    return q, k, normal(batch, rows, 6, 8), g, beta


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 150])
def test_chunks_equal_the_recurrence(rows):
    inputs = random_delta(2, rows)
    for chunked, sequential in zip(chunked_delta(*inputs), sequential_delta(*inputs), strict=True):
        torch.testing.assert_close(chunked, sequential, atol=1e-5, rtol=1e-4)


def test_gradients_of_chunks_equal_those_of_the_recurrence():
    inputs = [x.requires_grad_() for x in random_delta(1, 70)]
    chunked = torch.autograd.grad(chunked_delta(*inputs)[0].square().sum(), inputs)
    sequential = torch.autograd.grad(sequential_delta(*inputs)[0].square().sum(), inputs)
    for a, b in zip(chunked, sequential, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_inverse_survives_equal_keys():
    lower = torch.ones(1, 64, 64)  # all keys equal, beta 1, no decay: the worst case of a series
    wanted = torch.linalg.inv(torch.eye(64) + lower.tril(-1))
    torch.testing.assert_close(UnitLowerInverse.apply(lower), wanted)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_target_agrees_with_the_golden(golden, target, prompt):
    logits = target(golden[f"{prompt}.prompt"][None].long())
    torch.testing.assert_close(logits[0], golden[f"{prompt}.prefill_logits"], atol=1e-4, rtol=0)


def test_generation_equals_the_golden_loop(golden, target):
    prompts = [tuple(golden[f"{p}.prompt"].tolist()) for p in PROMPTS]
    answers = greedy(target, prompts, 64)  # prompts of different lengths in one batch
    for name, answer in zip(PROMPTS, answers, strict=True):
        assert list(answer) == golden[f"{name}.greedy_tokens"].tolist()


def test_fake_quantized_weights_equal_those_of_a_build():
    target = load_target(GOLDEN / "qwen3_5-tiny").requires_grad_(False)
    WeightQuantizer(target).apply()
    modules = dict(target.named_modules())
    linears = {name: m for name, m in modules.items() if isinstance(m, Linear)}
    assert sum(m.wide for m in linears.values()) == 12
    for name, linear in linears.items():
        if linear.wide:
            assert linear.quantized is None
            continue
        amax = max(float(modules[other].weight.abs().max()) for other in fused_group(name))
        built = dequantize(quantize_nvfp4(linear.weight.bfloat16(), amax))
        torch.testing.assert_close(linear.quantized, built, atol=0, rtol=1e-6)


def test_fake_quantized_target_agrees_with_the_nvfp4_golden(golden):
    target = load_target(GOLDEN / "qwen3_5-tiny").requires_grad_(False)
    WeightQuantizer(target).apply()
    target.lm_head.quantized = None  # the golden keeps its head in BF16
    logits = target(golden["p1.prompt"][None].long())
    torch.testing.assert_close(logits[0], golden["p1.nvfp4_w4a16_prefill_logits"], atol=1e-3, rtol=0)


def test_gradients_pass_fake_quantization():
    linear = Linear(32, 8)
    quantizer = WeightQuantizer(torch.nn.Sequential(linear))
    x = torch.randn(4, 32)
    quantizer.apply()
    assert not torch.equal(linear.quantized, linear.weight)
    linear(x).sum().backward()
    torch.testing.assert_close(linear.weight.grad, x.sum(0).expand(8, -1))
    quantizer.clear()
    assert linear.quantized is None


def test_fake_fp8_has_four_significant_bits():
    x = (torch.rand(1000) + 0.5).requires_grad_()
    y = fake_fp8(x)
    assert 0 < (y.detach() / x.detach() - 1).abs().max() <= 2**-4 + 1e-6
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(1000))
