"""Makes narrow heads out of the wide ones of train_predictors: the most useful units, then some training on a CPU.

    python benchmarks/shrink_heads.py --documents heldout.jsonl.gz --chats chats.json --out FOLDER head-2-rank-256.…

Traces some of the training texts (the held-out ones stay out), prints the recall on held-out ones.
"""

import argparse
import json
from pathlib import Path

from benchmarks.predictor_material import CONTEXT, load_nano, read_text
from steerpipe.predict.calibration import uncalibrated
from steerpipe.predict.files import load, save
from steerpipe.predict.head import ResidualHead
from steerpipe.predict.storage import Storage
from steerpipe.trace.live import windows
from steerpipe.train.drift import recall_by_layer
from steerpipe.train.fit import Schedule
from steerpipe.train.losses import margin_loss
from steerpipe.train.material import Material, collect, seen_in
from steerpipe.train.models import routers_of_model
from steerpipe.train.networks import fit_network
from steerpipe.train.recipes import calibrated
from steerpipe.train.shrink import shrink


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", type=Path, nargs="+")
    parser.add_argument("--documents", type=Path, required=True)
    parser.add_argument("--chats", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--steps", type=int, default=480)
    parser.add_argument("--tokens", type=int, default=100_000)
    options = parser.parse_args()
    model, folder = load_nano("cpu")
    text = read_text(options.documents, options.chats, folder, options.tokens)
    routers = routers_of_model(model)
    train, test = (collect(model, side, max_tokens=CONTEXT, openings=text.openings) for side in (text.train, text.test))
    seen = seen_in(windows(text.train, CONTEXT))
    material = Material(train, len(text.train), int(model.config.vocab_size), routers, seen=seen)
    for file in options.heads:
        wide = load(file, routers)
        assert isinstance(wide, ResidualHead), f"{file} is no head"
        (horizon,) = wide.horizons
        network = shrink(wide, train, options.rank)
        fit_network(network, train, routers, horizon, margin_loss, Schedule(options.steps, 1024, 2e-3, passes=3))
        out = options.out / f"head-{horizon}.safetensors"
        save(ResidualHead(network, routers, horizon, uncalibrated(1, routers.layers)), out, Storage.INT4)
        rounded = load(out, routers)  # the outputs learn to live with the rounding of the inputs
        assert isinstance(rounded, ResidualHead), "saved just now"
        schedule = Schedule(options.steps // 4, 1024, 1.5e-3, passes=4, seed=1)
        fit_network(rounded.network, train, routers, horizon, margin_loss, schedule, fixed={"down"})
        made = calibrated(rounded, material)
        made.training = wide.training
        made.seen = None if wide.seen is None else wide.seen | seen
        said = {"out": str(out), "bytes": save(made, out, Storage.INT4)}
        for name, head in (("wide", wide), ("narrow", load(out, routers))):
            assert isinstance(head, ResidualHead), "saved just now"
            recalls = recall_by_layer(head, test, horizon)[horizon:]
            said[name] = round(sum(recalls) / len(recalls), 4)
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
