"""Generate text with a trained model, printed token by token.

    python examples/generate.py runs/gpt2-1 "def main("

The model is a run of train_gpt2.py, one of its checkpoints, a folder with a GPT-2 in the layout of
Hugging Face transformers, or a merged file. `tensorgrad generate` has options for sampling, and
reads prompts from files and interactively.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tensorgrad import backend
from tensorgrad.models.generation import stream
from tensorgrad.train.load import load_gpt2

if __name__ == "__main__":
    path, prompt = sys.argv[1:]
    model, tokenizer = load_gpt2(Path(path))
    model.to(backend.use_device("auto"))
    print(prompt, end="", flush=True)
    for (token,) in stream(model, [tokenizer.encode(prompt)], 200, temperature=0.8, top_p=0.95):
        if token == tokenizer.end_of_text:
            break
        print(tokenizer.decode([int(token)]), end="", flush=True)
    print()
