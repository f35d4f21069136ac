"""The trials on transformers, with its Trainer."""

import json
import tempfile
from pathlib import Path

import torch
from common import Trap, bytes_of, flip_bit, moved
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Trainer,
    TrainingArguments,
    get_cosine_schedule_with_warmup,
)
from trials import Result, outcome

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 64}


def _model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


def first_step() -> Result:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=1e-3)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=10, num_training_steps=100)
    rate = schedule.get_last_lr()[0]
    return outcome("right" if rate > 0 else "wrong", f"learning rate of the first step: {rate:g}")


def misspelled_key() -> Result:
    try:
        config = LlamaConfig(**SHAPE, num_hiden_layers=7)
    except (TypeError, ValueError) as error:
        return outcome("refused", str(error).splitlines()[0])
    return outcome("wrong", f"LlamaConfig(num_hiden_layers=7) has {config.num_hidden_layers} layers")


def small_updates() -> Result:
    with tempfile.TemporaryDirectory() as folder:
        _model().to(torch.bfloat16).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        rows = [{"input_ids": row, "labels": row} for row in torch.randint(64, (64, 16)).tolist()]
        settings = TrainingArguments(
            folder,
            max_steps=20,
            per_device_train_batch_size=4,
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            bf16=True,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
        )
        Trainer(model, settings, train_dataset=rows).train()
    share = moved(before, model)
    return outcome("right" if share > 0.5 else "wrong", f"{share:.0%} of the numbers changed in 20 steps; dtype {model.dtype}")


def _seen(model: torch.nn.Module) -> float:
    """Returns the change of the second document's logits when the first document changes, packed by positions."""
    ids = torch.arange(16)[None] % 60
    positions = torch.cat([torch.arange(8), torch.arange(8)])[None]
    other = ids.clone()
    other[:, :8] += 3
    with torch.no_grad():
        logits = [model.eval()(each, position_ids=positions, use_cache=False).logits[:, 8:] for each in (ids, other)]
    return (logits[0] - logits[1]).abs().max().item()


def packed_documents() -> Result:
    change = _seen(_model().double())
    return outcome("right" if change == 0 else "wrong", f"logits change by {change:.2g} (position_ids start again at 0)")


def recurrent_state() -> Result:
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        **SHAPE,
        num_key_value_heads=2,
        head_dim=8,
        layer_types=["linear_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    change = _seen(Qwen3NextForCausalLM(config))
    return outcome("right" if change < 1e-6 else "wrong", f"Gated DeltaNet (qwen3_next): logits change by {change:.2g}")


def _rewritten(change: object) -> Result:
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as folder:
        model, file = _model(), Path(folder, "model.safetensors")
        model.save_pretrained(folder)
        if change == "bit":
            flip_bit(Path(folder), bytes_of(model.model.layers[0].self_attn.q_proj.weight))
        else:
            tensors = load_file(file)
            del tensors["model.layers.1.self_attn.q_proj.weight"]
            save_file(tensors, file, {"format": "pt"})
        try:
            again = AutoModelForCausalLM.from_pretrained(folder)
        except Exception as error:  # noqa: BLE001 (any refusal counts)
            return outcome("refused", str(error).splitlines()[0][:120])
    different = sorted(name for name, value in again.state_dict().items() if not torch.equal(value, model.state_dict()[name]))
    return outcome("wrong", f"loaded, {len(different)} tensor differs" + ("; a warning" if change == "tensor" else ""))


def missing_tensor() -> Result:
    return _rewritten("tensor")


def flipped_bit() -> Result:
    return _rewritten("bit")


def code_in_a_checkpoint() -> Result:
    with tempfile.TemporaryDirectory() as folder:
        model = _model()
        model.config.save_pretrained(folder)
        trap = Path(folder, "ran")
        torch.save(model.state_dict() | {"trap": Trap(trap)}, Path(folder, "pytorch_model.bin"))
        Path(folder, "generation_config.json").write_text(json.dumps({}))
        try:
            AutoModelForCausalLM.from_pretrained(folder)
        except Exception as error:  # noqa: BLE001
            return outcome("wrong" if trap.exists() else "refused", f"pytorch_model.bin: {type(error).__name__}")
        return outcome("wrong" if trap.exists() else "right", f"the code ran: {trap.exists()}")
