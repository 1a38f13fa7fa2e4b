"""Fine-tune a chat model by the calls of a MindSpore script, on eight devices in four pipeline stages.

    shardwise run --device cpu --models-dir models examples/mindspore_style.py

The line `communication.init()` starts eight processes of this file. In each of them it goes on below that line; in
the process that you have started nothing more runs.
"""

from __future__ import annotations

from collections.abc import Iterator

import shardwise.mindspore as ms
from shardwise import AutoModel, AutoTokenizer, Trainer, TrainingArguments
from shardwise.mindspore.dataset import GeneratorDataset

MODEL = "mindspore/llama2-7b-chat"  # a folder of that name, or of its last part, below --models-dir
LESSONS = {
    "What is a pipeline stage?": "A run of blocks that one group of devices holds.",
    "What fills the pipeline?": "Micro-batches: parts of a batch that follow each other.",
    "Who sums the gradients?": "The data ranks, before the optimizer steps.",
    "Does the loss depend on the split?": "No, it is the loss of one device.",
}


def lessons() -> Iterator[tuple[str, str]]:
    """The rows: a question and its answer."""
    yield from LESSONS.items()


def main() -> None:
    """Everything in the order of a MindSpore script."""
    ms.set_context(mode=ms.GRAPH_MODE, device_target="Ascend")
    ms.set_auto_parallel_context(
        parallel_mode=ms.ParallelMode.SEMI_AUTO_PARALLEL,  # what is not given is filled in
        device_num=8,
        pipeline_stages=4,
        micro_batch_num=4,
        gradient_aggregation_group=2,
    )
    ms.communication.init()
    ms.set_seed(1)
    print(f"rank {ms.communication.get_rank()} of {ms.communication.get_group_size()} is here")

    dataset = GeneratorDataset(lessons, column_names=["question", "answer"], shuffle=False).batch(2)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    arguments = TrainingArguments(
        output_dir="output/mindspore_style",
        batch_size=2,
        epochs=2,
        learning_rate=2e-4,
        use_lora=True,
        save_strategy="epoch",
        logging_steps=1,
    )
    trainer = Trainer(AutoModel.from_pretrained(MODEL), arguments, train_dataset=dataset, tokenizer=tokenizer)
    result = trainer.train()
    # A run that is resumed at its end makes no step.
    print("nothing was left to train" if result.loss is None else f"final loss {result.loss:.4f}")
    ms.communication.release()


if __name__ == "__main__":
    main()
