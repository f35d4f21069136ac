"""Checkpoints of other frameworks: transformers computes the same logits from the same numbers."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from warnings import catch_warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from forge_core.errors import ForgeError
from forge_models.hf.streamed_forward import logits_of
from forge_train.formats.forge import ForgeConverter
from forge_train.formats.frameworks import KEMPNERFORGE, TORCHTITAN, FrameworkWeights, Names, read_framework, read_nanogpt
from forge_train.formats.torch_files import DcpConverter, TorchConverter
from harness.siblings import fast
from models.hf.command_line import run

State = dict[str, torch.Tensor]
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
RECIPE = """
[model]
name = "decoder"
dim = 32
layers = 2
heads = 4
kv_heads = 2
ffn_dim = 48
vocab_size = 61
max_length = 64
[model.norm]
name = "rmsnorm"
eps = 1e-5
"""
MOE = """
[model.moe]
experts = 4
top_k = 2
ffn_dim = 48
router = {name = "softmax_topk"}
"""
TOKENS = torch.randint(61, (2, 17), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return str(tmp_path / "recipe.toml")


def renamed(state: State, *pairs: tuple[str, str]) -> State:
    found = {}
    for name, tensor in state.items():
        for theirs, other in pairs:
            name = name.replace(theirs, other)
        found[name] = tensor.detach().clone()
    return found


def of_kempnerforge(model: Any) -> State:
    """What its `transformer.py` and `attention.py` call the tensors of transformers' Llama."""
    return renamed(
        model.state_dict(),
        ("model.embed_tokens", "token_embedding.embedding"),
        ("lm_head", "output_head.proj"),
        ("model.", ""),
        ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "mlp_norm"),
        ("self_attn", "attention"),
    )


def of_torchtitan(model: Any, qkv: str = "attention.qkv_linear.w", head: str = "lm_head") -> State:
    """What its models call them."""
    return renamed(
        model.state_dict(),
        ("model.embed_tokens", "tok_embeddings"),
        ("lm_head", head),
        ("model.", ""),
        ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        *((f"self_attn.{one}_proj", f"{qkv}{one}") for one in "qkv"),
        ("self_attn.o_proj", "attention.wo"),
        ("self_attn", "attention"),
        *((f"mlp.{name}_proj", f"feed_forward.w{number}") for name, number in (("gate", 1), ("down", 2), ("up", 3))),
    )


def in_pairs(state: State, heads: int = 4, kv_heads: int = 2) -> State:
    """Rows of q and k as Llama's own code has them: dimension i of the first half next to dimension i of the second."""
    for name, weight in state.items():
        count = heads if name.endswith("wq.weight") else kv_heads if name.endswith("wk.weight") else 0
        if count:
            width = len(weight) // count
            places = torch.arange(len(weight)).view(count, 2, width // 2)  # head, member, pair
            order = torch.stack((places[:, 0], places[:, 1]), dim=-1).flatten()
            state[name] = weight[order]
    return state


def opened(names: Names, state: State, folder: Path, recipe: str) -> FrameworkWeights:
    (folder / "tensors").mkdir()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, str(folder / "tensors" / "0.safetensors"))
    return FrameworkWeights(names, [folder / "tensors"], recipe, folder / "step_3", 3)


def assert_computes(weights: Any, model: Any) -> None:
    with torch.no_grad():
        expected = model(TOKENS).logits
    error = (logits_of(weights, TOKENS) - expected).abs().max() / expected.abs().max()
    assert float(error) < 1e-5


@pytest.mark.parametrize(
    ("names", "state"),
    [
        (KEMPNERFORGE, of_kempnerforge),
        (TORCHTITAN, lambda model: in_pairs(of_torchtitan(model))),
        (TORCHTITAN, lambda model: in_pairs(of_torchtitan(model, "attention.w", "output"))),
    ],
    ids=["KempnerForge", "torchtitan", "torchtitan in 2025"],
)
def test_a_dense_model_computes_what_transformers_does(
    llama: LlamaForCausalLM, recipe: str, tmp_path: Path, names: Names, state: Callable[[Any], State]
) -> None:
    weights = opened(names, state(llama), tmp_path, recipe)
    assert_computes(weights, llama)
    name = "blocks.1.attention.k_proj.weight"
    whole = weights.read([name])[name]
    assert torch.equal(weights.box(name, (3, 5), (7, 9)), whole[3:10, 5:14]) and weights.tensors[name].shape == whole.shape


def test_qwen_of_torchtitan_has_rotated_halves(recipe: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    Path(recipe).write_text(RECIPE + '[model.attention]\nname = "gqa"\nqk_norm = "head"\n')
    assert_computes(opened(TORCHTITAN, of_torchtitan(model), tmp_path, recipe), model)


def experts_of(model: Any, kind: str) -> State:
    """Mixtral's experts under the names of a framework; transformers keeps gate and up of all experts in one tensor."""
    state = {"torchtitan": lambda: in_pairs(of_torchtitan(model))}.get(kind, lambda: of_kempnerforge(model))()
    for layer in range(2):
        place = f"layers.{layer}.mlp"
        both, down = state.pop(f"{place}.experts.gate_up_proj"), state.pop(f"{place}.experts.down_proj")
        router = state.pop(f"{place}.gate.weight")
        parts = {"gate": both[:, :48], "up": both[:, 48:], "down": down}
        if kind == "torchtitan":
            short = {"gate": "w1_EFD", "down": "w2_EDF", "up": "w3_EFD"}
            moe = f"layers.{layer}.moe"
            state |= {f"{moe}.routed_experts.inner_experts.{short[name]}": tensor for name, tensor in parts.items()}
            state |= {f"{moe}.router.gate.weight": router, f"{moe}.tokens_per_expert_E": torch.ones(4)}
            continue
        state[f"{place}.router.gate.weight"] = router
        for name, tensor in parts.items():
            if kind == "packed":
                state[f"{place}.{name}_w"] = tensor.transpose(1, 2)
            else:
                state |= {f"{place}.experts.{expert}.{name}_proj.weight": one for expert, one in enumerate(tensor)}
    return state


@pytest.mark.parametrize("kind", ["one by one", "packed", "torchtitan"])
def test_experts_compute_what_those_of_mixtral_do(recipe: str, tmp_path: Path, kind: str) -> None:
    torch.manual_seed(2)
    model = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)).eval()
    Path(recipe).write_text(RECIPE + MOE)
    names = TORCHTITAN if kind == "torchtitan" else KEMPNERFORGE
    assert_computes(opened(names, experts_of(model, kind), tmp_path, recipe), model)


def test_a_bias_of_routers_that_means_something_else_is_refused(recipe: str, tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None))
    Path(recipe).write_text(RECIPE + MOE.replace("softmax_topk", "sigmoid_topk"))
    state = experts_of(model, "packed")
    for layer in range(2):
        state |= {
            f"layers.{layer}.mlp.router.expert_bias": torch.zeros(4),
            f"layers.{layer}.mlp.router.expert_ema": torch.ones(4),
        }
    zero = opened(KEMPNERFORGE, state, tmp_path, recipe)
    assert not zero.read(["blocks.1.mlp.router.bias"])["blocks.1.mlp.router.bias"].any()
    (tmp_path / "other").mkdir()
    state["layers.1.mlp.router.expert_bias"][2] = 0.5
    with pytest.raises(ForgeError, match=r"layers\.1\.mlp\.router\.expert_bias: in KempnerForge this bias also"):
        opened(KEMPNERFORGE, state, tmp_path / "other", recipe)


def test_a_learned_bias_of_routers_is_not_read_from_a_bias_that_balances(recipe: str, tmp_path: Path) -> None:
    model = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None))
    Path(recipe).write_text(RECIPE + MOE.replace('"softmax_topk"', '"softmax_topk", bias = true'))
    state = experts_of(model, "torchtitan")
    state |= {f"layers.{layer}.moe.expert_bias_E": torch.zeros(4) for layer in range(2)}
    with pytest.raises(ForgeError, match=r"model\.moe\.router\.bias = true: torchtitan has no learned biases .*; remove the key"):
        opened(TORCHTITAN, state, tmp_path, recipe)


def test_a_tied_head_is_left_out_only_if_it_is_the_embedding(llama: LlamaForCausalLM, recipe: str, tmp_path: Path) -> None:
    Path(recipe).write_text(RECIPE.replace("[model.norm]", "tied_embeddings = true\n[model.norm]"))
    state = of_kempnerforge(llama)
    with pytest.raises(ForgeError, match=r"output_head\.proj\.weight: not in the model"):
        opened(KEMPNERFORGE, state, tmp_path, recipe)
    state["output_head.proj.weight"] = state["token_embedding.embedding.weight"].clone()
    (tmp_path / "equal").mkdir()
    assert "head.weight" not in opened(KEMPNERFORGE, state, tmp_path / "equal", recipe).tensors


def test_what_does_not_fit_is_listed_at_once(llama: LlamaForCausalLM, recipe: str, tmp_path: Path) -> None:
    state = of_kempnerforge(llama)
    del state["layers.0.attention.q_proj.weight"], state["norm.weight"]
    state["layers.1.attention.sinks"] = torch.zeros(4)
    with pytest.raises(ForgeError) as caught:
        opened(KEMPNERFORGE, state, tmp_path, recipe)
    told = str(caught.value)
    assert "under the names of KempnerForge, do not fit the model of" in told and recipe in told
    assert "blocks.0.attention.q_proj.weight: missing (layers.0.attention.q_proj.weight)" in told
    assert "norm.weight: missing (norm.weight)" in told and "layers.1.attention.sinks: not in the model" in told
    Path(recipe).write_text(RECIPE.replace("ffn_dim = 48", "ffn_dim = 40"))
    (tmp_path / "shape").mkdir()
    with pytest.raises(ForgeError, match=r"blocks\.0\.mlp\.up_proj\.weight: shape \(48, 32\), in the model \(40, 32\)"):
        opened(KEMPNERFORGE, of_kempnerforge(llama), tmp_path / "shape", recipe)


def saved(path: Path, state: dict[str, Any]) -> None:
    with catch_warnings(action="ignore", category=UserWarning):
        dcp.save(state, checkpoint_id=path, no_dist=True)


def test_a_checkpoint_of_pipeline_stages_is_converted(
    llama: LlamaForCausalLM, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the optimizer's state beside the model, as KempnerForge saves it, and files of another trust next to it."""
    folder, state = tmp_path / "step_12", of_kempnerforge(llama)
    later = ("layers.1.", "norm.", "output_head.")
    for stage, kept in enumerate((False, True)):
        part = {name: tensor for name, tensor in state.items() if name.startswith(later) is kept}
        moments = {f"{name}.exp_avg": torch.ones(2) for name in part}
        saved(folder / f"pp{stage}", {"model": part, "optimizer": {"state": moments, "param_groups": [{"lr": 0.1}]}})
    (folder / "train_state.pt").write_bytes(pickle.dumps({"step": 12}))
    command = ["convert", folder, tmp_path / "out", "--from", "dcp", "--names", "kempnerforge", "--to", "forge"]
    assert run(*command) == 2
    assert "forge-train migrate" in capsys.readouterr().err
    assert run(*command, "--recipe", recipe) == 0
    assert "tensors that are not the model's, such as optimizer state, were left out" in capsys.readouterr().out
    weights = ForgeConverter().read(tmp_path / "out")
    assert weights.facts.step == 12
    assert_computes(weights, llama)


class Payload:
    """Writes a file where it is unpickled."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.sentinel}",)


def test_code_of_a_checkpoint_is_not_run(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "step-5").mkdir()
    (tmp_path / "step-5" / ".metadata").write_bytes(pickle.dumps(Payload(tmp_path / "sentinel")))
    with pytest.raises(ForgeError, match=r"contains more than tensors \(\w+\.system\)"):
        read_framework(TORCHTITAN, tmp_path / "step-5", recipe, unsafe=False)
    assert not (tmp_path / "sentinel").exists()


def test_errors_say_what_to_do(recipe: str, tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="pass the folder of one step"):
        read_framework(TORCHTITAN, tmp_path, recipe, unsafe=False)
    with pytest.raises(ForgeError, match="does not write them; write the format hf"):
        DcpConverter(recipe=recipe, prefix="", names="torchtitan", unsafe_pickle=False).write(tmp_path / "out", None)  # type: ignore[arg-type]
    (tmp_path / "vlm.toml").write_text('[model]\nname = "vlm"\n')
    with pytest.raises(ForgeError):
        opened(KEMPNERFORGE, {"norm.weight": torch.ones(2)}, tmp_path, str(tmp_path / "vlm.toml"))


def test_what_cannot_be_told_is_refused(llama: LlamaForCausalLM, recipe: str, tmp_path: Path) -> None:
    Path(recipe).write_text(RECIPE + "[model.rope]\npartial = 0.5\n")
    with pytest.raises(ForgeError, match=r"rope\.partial = 0\.5: torchtitan rotates whole heads; set it to 1"):
        opened(TORCHTITAN, in_pairs(of_torchtitan(llama)), tmp_path, recipe)
    Path(recipe).write_text(RECIPE + MOE.replace("ffn_dim = 48", "ffn_dim = 32"))
    state = {name: tensor for name, tensor in in_pairs(of_torchtitan(llama)).items() if "feed_forward" not in name}
    for layer in range(2):
        moe = f"layers.{layer}.moe"
        state |= {f"{moe}.experts.{short}": torch.zeros(4, 32, 32) for short in ("w1", "w2", "w3")}
        state[f"{moe}.router.gate.weight"] = torch.zeros(4, 32)
    (tmp_path / "square").mkdir()
    with pytest.raises(ForgeError, match=r"moe\.experts\.w1: square, so nothing tells whether this release of torchtitan"):
        opened(TORCHTITAN, state, tmp_path / "square", recipe)


def test_a_missing_embedding_is_listed_when_the_head_is_tied(llama: LlamaForCausalLM, recipe: str, tmp_path: Path) -> None:
    Path(recipe).write_text(RECIPE.replace("[model.norm]", "tied_embeddings = true\n[model.norm]"))
    state = of_kempnerforge(llama)
    del state["token_embedding.embedding.weight"]
    with pytest.raises(ForgeError, match=r"embed\.weight: missing"):
        opened(KEMPNERFORGE, state, tmp_path, recipe)


GPT = "n_layer = 2\nn_head = 4\nn_embd = 32\nblock_size = 64\nbatch_size = 1\nmax_iters = 10\nbias = {}\n"
"""A configuration of nanoGPT."""


def gpt(bias: bool) -> GPT2LMHeadModel:
    """What nanoGPT computes: transformers' GPT-2 with the exact gelu. Zero biases stand for a model without any."""
    torch.manual_seed(3)
    sizes = {"vocab_size": 61, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, activation_function="gelu")).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "bias" in name and bias:
                weight.normal_(std=0.3)
            elif "ln_" in name and "weight" in name:
                weight.uniform_(0.5, 1.5)
    return model


def of_nanogpt(model: GPT2LMHeadModel, bias: bool, compiled: bool = False) -> State:
    """The tensors of its `model.py`: linear layers with outputs before inputs, and as `torch.compile` names them."""
    state = {}
    for name, tensor in model.state_dict().items():
        linear = name.endswith(".weight") and any(part in name for part in ("c_attn", "c_proj", "c_fc"))
        if bias or not name.endswith("bias"):
            state[f"{'_orig_mod.' if compiled else ''}{name}"] = (tensor.T if linear else tensor).contiguous()
    return state


def checkpoint_of(state: State) -> dict[str, Any]:
    """What its `train.py` saves."""
    moments = {0: {"step": torch.tensor(7.0), "exp_avg": torch.ones(2)}}
    return {
        "model": state,
        "optimizer": {"state": moments, "param_groups": [{"lr": 6e-4, "betas": (0.9, 0.95)}]},
        "model_args": {"n_layer": 2, "bias": True, "vocab_size": 61},
        "iter_num": 7,
        "best_val_loss": torch.tensor(1.5),
        "config": {"out_dir": "out", "compile": True},
    }


@pytest.mark.parametrize("bias", fast(True, of=[True, False]))
def test_a_file_of_nanogpt_computes_what_transformers_does(
    tmp_path: Path, bias: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the recipe that `migrate` writes, in the folder that nanoGPT makes; compiled, as its `train.py` runs by default."""
    model, folder = gpt(bias), tmp_path / "out-gpt2"
    folder.mkdir()
    torch.save(checkpoint_of(of_nanogpt(model, bias, compiled=not bias)), folder / "ckpt.pt")
    (tmp_path / "train.py").write_text(GPT.format(bias))
    recipe = tmp_path / "gpt.toml"
    assert run("migrate", tmp_path / "train.py", "--out", recipe) == 0
    recipe.write_text(recipe.read_text().replace("vocab_size = 50304", "vocab_size = 61"))
    command = ["convert", folder, tmp_path / "out", "--names", "nanogpt", "--to", "forge"]
    assert run(*command) == 2
    assert "forge-train migrate" in capsys.readouterr().err
    assert run(*command, "--recipe", recipe) == 0
    assert "3 tensors that are not the model's, such as optimizer state, were left out" in capsys.readouterr().out
    weights = ForgeConverter().read(tmp_path / "out")
    assert_computes(weights, model)
    name = "blocks.1.attention.v_proj.weight"
    whole = weights.read([name])[name]
    fused = model.state_dict()["transformer.h.1.attn.c_attn.weight"].T
    assert torch.equal(whole, fused[64:])
    again = read_nanogpt(folder / "ckpt.pt", str(recipe), unsafe=False)
    assert torch.equal(again.box(name, (3, 5), (7, 9)), whole[3:10, 5:14])
    code = run("convert", tmp_path / "out", tmp_path / "hf", "--from", "forge", "--to", "hf", "--family", "gpt2")
    assert code == (0 if bias else 2)  # the family has biases
    if bias:
        assert_computes(again, GPT2LMHeadModel.from_pretrained(tmp_path / "hf"))


SMALL_GPT = (
    '[model]\nname = "decoder"\ndim = 32\nlayers = 2\nheads = 4\nffn_dim = 128\nvocab_size = 61\nmax_length = 64\n'
    'tied_embeddings = true\nlearned_positions = true\n[model.norm]\nname = "layernorm"\n'
    '[model.mlp]\nname = "gelu"\nexact = true\nbias = true\n'
    '[model.attention]\nname = "gqa"\nqkv_bias = true\noutput_bias = true\n'
)


def test_what_is_no_file_of_nanogpt_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "gpt.toml"
    recipe.write_text(SMALL_GPT + "nope_every = 1\n")
    with pytest.raises(ForgeError, match=r"ckpt\.pt does not exist; pass the file of nanoGPT"):
        read_nanogpt(tmp_path, str(recipe), unsafe=False)
    file = tmp_path / "ckpt.pt"
    torch.save({"model": {"payload": Payload(tmp_path / "sentinel")}}, file)
    with pytest.raises(ForgeError, match="contains more than tensors"):
        read_nanogpt(tmp_path, str(recipe), unsafe=False)
    assert not (tmp_path / "sentinel").exists()
    file.write_bytes(b"no archive")
    with pytest.raises(ForgeError, match="could not be unpickled"):
        read_nanogpt(file, str(recipe), unsafe=False)


@pytest.mark.slow
def test_a_recipe_that_is_not_the_model_of_a_file_of_nanogpt_is_refused(tmp_path: Path) -> None:
    recipe, file = tmp_path / "gpt.toml", tmp_path / "ckpt.pt"
    recipe.write_text(SMALL_GPT + "nope_every = 1\n")
    state = of_nanogpt(gpt(bias=True), bias=True)
    torch.save(checkpoint_of(state | {"transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64)}), file)  # the mask of older files
    assert "positions.weight" in read_nanogpt(file, str(recipe), unsafe=False).tensors
    recipe.write_text(SMALL_GPT + "nope_every = 2\n")
    with pytest.raises(ForgeError, match=r"model\.attention\.nope_every is not 1: nanoGPT rotates nothing; set it to 1"):
        read_nanogpt(file, str(recipe), unsafe=False)
    recipe.write_text(SMALL_GPT.replace("learned_positions = true", "") + "nope_every = 1\n")
    with pytest.raises(ForgeError, match=r"transformer\.wpe\.weight: not in the model"):
        read_nanogpt(file, str(recipe), unsafe=False)
    recipe.write_text(SMALL_GPT.replace("heads = 4", "heads = 4\nkv_heads = 2") + "nope_every = 1\n")
    with pytest.raises(ForgeError, match=r"k_proj\.weight: shape \(32, 32\), in the model \(16, 32\)"):
        read_nanogpt(file, str(recipe), unsafe=False)
    with pytest.raises(ForgeError, match="does not write them; write the format hf"):
        TorchConverter(recipe=None, prefix="", names="nanogpt", unsafe_pickle=False).write(tmp_path / "out", None)  # type: ignore[arg-type]
