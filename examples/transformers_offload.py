"""Runs a transformers MoE model with a quarter of its experts in memory, and shows that its logits are the same.

    python examples/transformers_offload.py [FOLDER] [FAST_MEMORY]

Without a folder it makes a small random Qwen3-MoE, attaches it, detaches it, and loads it again without its experts.
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from steerpipe.core.units import format_bytes
from steerpipe.integrations.transformers import Attachment, attach, attachment_of, load


def small_model() -> PreTrainedModel:
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=1000, hidden_size=256, intermediate_size=512, moe_intermediate_size=128,
        num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4, head_dim=32, num_experts=64,
        num_experts_per_tok=4, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    return model


def report(title: str, model: PreTrainedModel, attachment: Attachment) -> None:
    held = sum(parameter.nbytes for parameter in model.parameters() if not parameter.is_meta)
    counts = attachment.counters()
    print(
        f"{title}: modules {format_bytes(held)}, slots {format_bytes(attachment.fast_bytes)}, "
        f"blocks on disk {format_bytes(attachment.disk_bytes)}; "
        f"{counts.hits} hits, {counts.late} late, {counts.misses} misses, {counts.stall_seconds:.2f} s waiting"
    )


@torch.no_grad()
def main(folder: Path | None, fast_memory: str) -> None:
    model = small_model() if folder is None else AutoModelForCausalLM.from_pretrained(folder)
    model.set_experts_implementation("eager")  # the yardstick
    tokens = torch.arange(1, 33)[None]
    expected = model(tokens).logits
    with attach(model, fast_memory=fast_memory) as attachment:
        difference = (model(tokens).logits - expected).abs().max()
        model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=32, do_sample=False)
        report("attached", model, attachment)
        print(f"difference in logits: {float(difference)}")
    with tempfile.TemporaryDirectory() as temporary:
        source = folder or Path(temporary)
        if folder is None:
            model.save_pretrained(source)
        del model
        loaded = load(source, fast_memory=fast_memory)
        difference = (loaded(tokens).logits - expected).abs().max()
        report("loaded", loaded, attachment_of(loaded))
        print(f"difference in logits: {float(difference)}")


if __name__ == "__main__":
    given = sys.argv[1:]
    main(Path(given[0]) if given else None, given[1] if len(given) > 1 else "25%")
