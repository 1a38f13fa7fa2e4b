"""Fine-tune a chat model by the calls of a Hugging Face script, on four devices.

    python examples/train.py models/SmolLM2-135M-Instruct examples/data/chat.jsonl

`Trainer(...)` starts four processes of this file. Up to that line this process and each of them run the same; below
it only they do.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from shardwise import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments


def main() -> None:
    """Read the rows, train, evaluate, and keep the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder, or the name of a model")
    parser.add_argument("data", type=Path, help="a .jsonl file, one row a line")
    parser.add_argument("--output-dir", default="output/train_py")
    parser.add_argument("--max-steps", type=int, default=10)
    options = parser.parse_args()

    rows = [json.loads(line) for line in options.data.read_text(encoding="utf-8").splitlines()]
    held_out = len(rows) // 5
    arguments = TrainingArguments(
        output_dir=options.output_dir,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        max_steps=options.max_steps,
        learning_rate=5e-4,
        lr_scheduler_type="cosine",
        logging_steps=1,
        save_strategy="steps",
        save_steps=options.max_steps,
    )
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(options.model),
        args=arguments,
        train_dataset=rows[held_out:],
        eval_dataset=rows[:held_out],
        processing_class=AutoTokenizer.from_pretrained(options.model),
        strategy={"pp": 2, "dp_shard": 2, "tp": 1, "dp_replicate": 1},
    )
    result = trainer.train()
    scores = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"final loss {result.loss}, loss on held-out rows {scores['eval_loss']:.4f}")


if __name__ == "__main__":
    main()
