"""Options that several verbs have."""

from pathlib import Path
from typing import Annotated

from typer import Option

Threads = Annotated[int | None, Option(help="CPU threads")]
Dtype = Annotated[str | None, Option(help="auto, float32 or bfloat16")]
Device = Annotated[str | None, Option(help="auto, cpu or cuda")]
FastMemory = Annotated[str | None, Option(help="slots for experts: auto, 4GiB, or 25% of them")]
Ram = Annotated[str | None, Option(help="memory for experts in RAM, slots included without a GPU")]
Pace = Annotated[str | None, Option(help="slow the link to the experts to so many bytes per second")]
Policy = Annotated[str | None, Option(help="who leaves a slot first: auto, reuse, lfru or lru")]
Pin = Annotated[str | None, Option(help="how much of it a GPU copies from directly: auto, 8GiB, 0")]
Quality = Annotated[
    str | None,
    Option(help="answers without missing experts: exact, high, balanced, fast, a miss policy, or a plan"),
]
QualityProfile = Annotated[str | None, Option(help="what `steerpipe calibrate` wrote")]
Cover = Annotated[str | None, Option(help="first tokens that do not wait for experts, a number or auto; changes text")]
MaxContext = Annotated[int | None, Option(help="tokens of prompt and answer together")]
CacheDir = Annotated[str | None, Option(help="where packs of checkpoints are kept")]
Config = Annotated[Path | None, Option(help="TOML file with a table named engine")]
System = Annotated[str | None, Option(help="system message for the chat template")]
Temperature = Annotated[float | None, Option(help="0 is greedy; default: the model's own")]
TopP = Annotated[float | None, Option(help="sample among the likeliest of total probability p")]
Seed = Annotated[int | None, Option(help="same seed, same text")]
PrefillChunk = Annotated[int | None, Option(help="prompt tokens per step, a multiple of 16")]
Profile = Annotated[
    bool | None, Option("--profile/--no-profile", help="learn from the last run, and let the next learn")
]
KvMemory = Annotated[str | None, Option(help="for keys and values: 512MiB, or shared: pages of the fast memory")]
MaxTokens = Annotated[int | None, Option(help="most tokens of an answer")]
