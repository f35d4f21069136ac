"""The attention core: which kernel is chosen, and the arithmetic of those that need CUDA, run here in plain form."""

import pytest
import torch
from torch.nn.attention import flex_attention, varlen

from forge_core.protocols.model import PositionedTokens
from forge_models import accelerator
from forge_models.blocks import attention as module
from forge_models.blocks.attention import Boundaries, LocalAttention, mask, placed_mask
from forge_models.components.attentions import GQA, MLA
from harness.closeness import assert_no_farther

CPU = torch.device("cpu")
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 3], [4, 4, 4, 4, 4, 4, 4, 4, 4]], dtype=torch.int32)


def qkv(dtype=torch.float32, heads=4, kv_heads=2, width=16):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, heads, 9, width, generator=generator, dtype=dtype)
    k, v = torch.randn(2, 2, kv_heads, 9, width, generator=generator, dtype=dtype)
    return q, k, v


def by_hand(q, k, v, documents, window, scale, soft_cap):
    """Softmax over exactly the keys that each query sees."""
    out = torch.zeros_like(q)
    share = q.shape[1] // k.shape[1]
    for b in range(2):
        for h in range(q.shape[1]):
            for t in range(9):
                keys = [s for s in range(t + 1) if window is None or t - s < window]
                keys = [s for s in keys if documents is None or documents[b, s] == documents[b, t]]
                scores = k[b, h // share, keys] @ q[b, h, t] * scale
                if soft_cap is not None:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                out[b, h, t] = scores.softmax(0) @ v[b, h // share, keys]
    return out


@pytest.fixture
def plain(monkeypatch):
    """The functions of torch that are compiled on CUDA, as they are: their forward runs on a CPU.

    Eagerly: by itself `flex_attention` would be traced anew for every mask, which takes most of a second.
    """
    monkeypatch.setattr(module, "_compiled", lambda name: getattr(flex_attention, name))
    with torch.compiler.set_stance("force_eager"):
        yield


masks = pytest.mark.parametrize(("documents", "window"), [(None, None), (None, 3), (DOCUMENTS, None), (DOCUMENTS, 2)])


@masks
@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_sdpa_and_written_out(documents, window, soft_cap):
    q, k, v = qkv(torch.float64)
    core = LocalAttention("sdpa", capped=soft_cap is not None)
    shared = core.prepare(documents, 9, window, CPU)
    found = core(q, k, v, shared, 0.7, soft_cap)
    torch.testing.assert_close(found, by_hand(q, k, v, documents, window, 0.7, soft_cap), rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@masks
@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_flex(plain, documents, window, soft_cap):
    q, k, v = qkv()
    shared = module.block_mask(documents, 9, window, CPU)
    assert isinstance(shared, flex_attention.BlockMask)
    with torch.no_grad():
        found = LocalAttention("flex")(q, k, v, shared, 0.7, soft_cap)
    inputs = (documents, window, 0.7, soft_cap)
    assert_no_farther(found, by_hand(q, k, v, *inputs), by_hand(q.double(), k.double(), v.double(), *inputs))
    q, k, v = qkv(torch.float64)
    found = LocalAttention("flex")(q, k, v, shared, 0.7, soft_cap)  # falls back to a mask
    torch.testing.assert_close(found, by_hand(q, k, v, documents, window, 0.7, soft_cap), rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(("of_keys", "of_values"), [(8, 16), (16, 8), (8, 8)])
def test_heads_for_which_flex_has_no_kernel_are_widened(monkeypatch, of_keys, of_values):
    """On a GPU, compiled flex attention refuses heads of less than 16: a model for tests would not run there."""
    widths = []

    def eager(name):
        def run(q, k, v, **options):
            widths.append({x.shape[-1] for x in (q, k, v)})
            return flex_attention.flex_attention(q, k, v, **options)

        return run if name == "flex_attention" else getattr(flex_attention, name)

    monkeypatch.setattr(module, "_compiled", eager)
    (q, k, _), (_, _, v) = qkv(width=of_keys), qkv(width=of_values)
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        shared = module.block_mask(DOCUMENTS, 9, 3, CPU)
        found = LocalAttention()(q, k, v, shared, 0.7)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask(DOCUMENTS, 9, 3, CPU), scale=0.7, enable_gqa=True
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert widths == [{16}]


def test_flex_is_traced_in_a_compiled_block():
    """Whole, without a break: the compiler of torch 2.11 follows less of Python than later ones."""
    (q, k, v), cap = qkv(width=8), 5.0
    with torch.compiler.set_stance("force_eager"):  # the mask is made outside of blocks
        blocks = module.block_mask(DOCUMENTS, 9, 3, CPU)

    def block(q, k, v):
        return module.flex(q, k, v, blocks, 0.7, cap)

    with torch.no_grad():
        found = torch.compile(block, fullgraph=True, backend="eager")(q, k, v)
    torch.testing.assert_close(found, by_hand(q, k, v, DOCUMENTS, 3, 0.7, cap), rtol=1e-5, atol=1e-6)


@masks
@pytest.mark.parametrize("shares", [True, False], ids=["torch 2.12", "torch 2.11"])
def test_varlen(monkeypatch, documents, window, shares):
    """Until torch 2.11, keys must have as many heads as queries."""

    def reference(query, key, value, starts, same, longest, also, *, scale, window_size, enable_gqa=False):
        """Each run of the flattened rows by itself."""
        assert starts is same
        assert enable_gqa == shares and (key.shape[1] < query.shape[1]) == shares
        assert longest == also >= int(starts.diff().max())
        parts = []
        for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            q, k, v = (x[first:last].transpose(0, 1)[None] for x in (query, key, value))
            seen = mask(None, last - first, None if window_size[0] < 0 else window_size[0] + 1, CPU)
            assert window_size[1] == 0
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)

    def former(query, key, value, starts, same, longest, also, *, scale=None, window_size=(-1, -1)):
        return reference(query, key, value, starts, same, longest, also, scale=scale, window_size=window_size)

    monkeypatch.setattr(varlen, "varlen_attn", reference if shares else former)
    module._shares_heads.cache_clear()
    q, k, v = qkv(torch.float64)
    shared = module.boundaries(documents, 9, window, CPU)
    try:
        found = LocalAttention("varlen")(q, k, v, shared, 0.7)
    finally:
        module._shares_heads.cache_clear()
    torch.testing.assert_close(found, by_hand(q, k, v, documents, window, 0.7, None), rtol=1e-10, atol=1e-12)


def test_which_kernel_is_chosen_where(plain, monkeypatch):
    """`prepare` for CUDA, with the device check alone played: masks are then made on this machine."""
    monkeypatch.setattr(accelerator, "has_flex", lambda device, wanted=False: True)
    auto, capped = LocalAttention(), LocalAttention(capped=True)
    block = flex_attention.BlockMask
    assert auto.prepare(None, 9, None, "cpu") is None  # causal flash
    assert auto.prepare(None, 9, 9, "cpu") is None  # a window as long as the row hides nothing
    assert isinstance(auto.prepare(None, 9, 8, "cpu"), block)
    assert isinstance(auto.prepare(DOCUMENTS, 9, None, "cpu"), block)
    with torch.no_grad():  # with gradients, a length that is no multiple of 128 has a mask
        assert isinstance(capped.prepare(None, 9, None, "cpu"), block)
    assert isinstance(LocalAttention("flex").prepare(None, 9, None, "cpu"), block)
    assert isinstance(LocalAttention("sdpa").prepare(DOCUMENTS, 9, None, "cpu"), torch.Tensor)
    assert isinstance(LocalAttention("varlen").prepare(DOCUMENTS, 9, None, "cpu"), Boundaries)


@pytest.fixture
def order_of(monkeypatch):
    """(compute capability, whether FlashAttention-3 is installed) -> the order of kernels, and what was activated."""

    def order(capability, installed):
        activated = []
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(module, "find_spec", lambda name: object() if installed and name == "flash_attn_interface" else None)
        monkeypatch.setattr(module.attention, "activate_flash_attention_impl", activated.append)
        module._order.cache_clear()
        return module.whole_rows("cuda:0"), activated

    yield order
    module._order.cache_clear()


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_gpus_keep_the_order_of_torch(order_of, capability):
    assert order_of(capability, installed=True) == (None, [])


def test_a_gpu_of_amd_is_none_of_hopper(order_of, monkeypatch):
    """The capability of an MI300 reads 9.4, and its devices are called `cuda`."""
    monkeypatch.setattr(torch.version, "hip", "6.4.0")
    assert order_of((9, 4), installed=True) == (None, [])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    assert not accelerator.takes_lengths(torch.device("cuda", 0))


@pytest.mark.parametrize(("hip", "device"), [("6.4.0", "cuda:0"), (None, "xpu:0")])
def test_on_an_accelerator_where_it_is_not_proven_flex_is_never_taken(monkeypatch, caplog, hip, device):
    monkeypatch.setattr(torch.version, "hip", hip)
    accelerator._tell.cache_clear()
    there = torch.device(device)
    auto = LocalAttention()
    monkeypatch.setattr("forge_models.blocks.attention.mask", lambda *given: given)
    assert auto.prepare(None, 9, None, there) is None, "nothing to mask, nothing to say"
    assert auto.prepare(DOCUMENTS, 9, None, there) == (DOCUMENTS, 9, None, there, True)
    auto.prepare(DOCUMENTS, 9, None, there)
    kind = "ROCm" if hip else "xpu"
    said = [f"this accelerator ({kind}) has no tested flex attention" in one.message for one in caplog.records]
    assert said == [True], "once"
    assert LocalAttention("sdpa").prepare(DOCUMENTS, 9, None, there)
    for kind in ("flex", "varlen"):
        with pytest.raises(ValueError, match=f"'{kind}' needs a CUDA device"):
            LocalAttention(kind).prepare(DOCUMENTS, 9, None, there)
    accelerator._tell.cache_clear()


def test_on_hopper_the_kernels_that_were_made_for_it_come_first(order_of):
    order, activated = order_of((9, 0), installed=False)
    assert (order.kernels[0].name, activated) == ("CUDNN_ATTENTION", [])
    order, activated = order_of((9, 0), installed=True)
    assert (order.kernels[0].name, activated) == ("FLASH_ATTENTION", ["FA3"])
    assert {kernel.name for kernel in order.kernels} == {"FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"}


@pytest.mark.filterwarnings("ignore")
def test_an_order_of_kernels_changes_no_number_and_compiles_whole(order_of):
    q, k, v = qkv(torch.float64)
    order, _ = order_of((9, 0), installed=False)
    core = LocalAttention()
    expected = by_hand(q, k, v, None, None, 0.7, None)
    torch.testing.assert_close(core(q, k, v, order, 0.7), expected, rtol=1e-10, atol=1e-12)
    capped = by_hand(q, k, v, None, None, 0.7, 1.5)
    torch.testing.assert_close(core(q, k, v, order, 0.7, 1.5), capped, rtol=1e-10, atol=1e-12)
    compiled = torch.compile(core.__call__, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, order, 0.7), expected, rtol=1e-10, atol=1e-12)
    assert torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)[0].name != "CUDNN_ATTENTION"


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@masks
@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize(
    ("make_mask", "dtype"), [("mask", torch.float64), ("block_mask", torch.float32), ("block_mask", torch.float64)]
)
def test_queries_and_keys_in_any_order(plain, documents, window, soft_cap, make_mask, dtype):
    q, k, v = qkv(dtype)
    rows, columns = torch.tensor([7, 0, 3, 8]), torch.tensor([4, 8, 0, 3, 1, 7, 2, 5, 6])
    queries, keys = (PositionedTokens(at, None if documents is None else documents[:, at]) for at in (rows, columns))
    core = LocalAttention(capped=soft_cap is not None)
    shared = (placed_mask if make_mask == "mask" else module.placed_block_mask)(queries, keys, window)
    assert isinstance(shared, torch.Tensor) == (make_mask == "mask")
    if make_mask == "mask":
        assert torch.equal(core.prepare_placed(queries, keys, window), shared)
    found = core(q[:, :, rows], k[:, :, columns], v[:, :, columns], shared, 0.7, soft_cap)
    inputs = (documents, window, 0.7, soft_cap)
    expected, exact = (by_hand(*(x.to(wide) for x in (q, k, v)), *inputs)[:, :, rows] for wide in (dtype, torch.float64))
    if dtype == torch.float64:
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)
    else:
        assert_no_farther(found, expected, exact)


@pytest.mark.parametrize(("kind", "reason"), [("flex", "needs a CUDA device"), ("varlen", "whole rows only")])
def test_kernels_that_cannot_place_keys_are_refused(kind, reason):
    row = PositionedTokens(torch.arange(4), None)
    with pytest.raises(ValueError, match=f"'{kind}'.*{reason}"):
        LocalAttention(kind).prepare_placed(row, row, None)


@pytest.mark.parametrize("kind", ["flex", "varlen"])
def test_kernels_of_another_device_are_refused(make, tokens, kind):
    with pytest.raises(ValueError, match=f"'{kind}' needs a CUDA device"):
        make(attention=GQA(core=kind))(tokens(1, 5))


@pytest.mark.parametrize("option", [{"soft_cap": 3.0}, {"sinks": True}])
def test_a_core_that_knows_no_soft_cap_or_sinks_is_refused(make, tokens, option):
    class Replacement(LocalAttention):
        def __call__(self, q, k, v, shared, scale):
            return super().__call__(q, k, v, shared, scale)

    model = make(attention=GQA(**option))
    model.blocks["0"].attention.core = Replacement()
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{next(iter(option))}'"):
        model(tokens(1, 5))


def test_a_latent_cache_holds_the_latent_only(make, tokens):
    mla = MLA(kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=10)
    model = make(kv_heads=None, attention=mla)
    cache = model.new_cache(2, 5)
    model(tokens(2, 5), cache=cache)
    layer = cache.layers["1"]
    assert (layer.k.shape, layer.v.shape) == ((2, 1, 5, 4), (2, 1, 5, 12))
