"""Generate text with a trained model, printed token by token.

    python examples/generate.py runs/gpt2-1 "def main("

The model is a run of train_gpt2.py, one of its checkpoints, a folder with a published model in the
layout of Hugging Face transformers, or a merged file. `tensorgrad generate` has options for
sampling, chats, and reads prompts from files and interactively.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from cyclopts import App

from tensorgrad import backend
from tensorgrad.data import TextStream
from tensorgrad.io.command import command
from tensorgrad.models.generation import stream
from tensorgrad.train.command_line import run_app
from tensorgrad.train.load import load_language_model


def generate(model: Path, prompt: str, /) -> None:
    """Generate text.

    Args:
        model: a run, a checkpoint, a Hugging Face folder or a merged file.
        prompt: text to continue; "" begins a document.
    """
    found, tokenizer = load_language_model(model)
    found.to(backend.use_device("auto"))
    text = TextStream(tokenizer)
    print(prompt, end="")
    ids = tokenizer.encode_prompt(prompt)
    for (token,) in stream(found, [ids], 200, temperature=0.8, top_p=0.95):
        if token in tokenizer.end_tokens:
            break
        print(text.add(int(token)), end="", flush=True)
    print(text.rest())


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    run_app(App("python examples/generate.py", default_command=generate), arguments)


if __name__ == "__main__":
    sys.exit(main())
