"""The program that encodes a long text, in a process of its own: see published_tokenizer.py.

A regular expression of a stranger may take time that grows with the square of the length. This file
imports nothing of tensorgrad, so that it starts soon.
"""

from __future__ import annotations

import ast
import json
import sys


def main() -> None:
    """Encode the text of the literal on the standard input; write JSON with "ids"."""
    given = ast.literal_eval(sys.stdin.read())
    sys.path += given["path"]
    from tokenizers import Tokenizer

    inner = Tokenizer.from_str(given["tokenizer"])
    inner.no_truncation()
    inner.no_padding()
    ids = inner.encode(given["text"], add_special_tokens=given["with_special"]).ids
    json.dump({"ids": ids}, sys.stdout)


if __name__ == "__main__":
    main()
