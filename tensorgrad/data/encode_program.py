"""The program that encodes long texts, in a process of its own: see limited_encoding.py.

An untrusted regular expression may take time that grows with the square of the length. This file
imports nothing of tensorgrad, so that it starts soon.
"""

from __future__ import annotations

import ast
import json
import sys


def main() -> None:
    """Encode the texts of the literal on the standard input; write JSON with the "ids" of each."""
    given = ast.literal_eval(sys.stdin.read())
    sys.path += given["path"]
    from tokenizers import Tokenizer

    inner = Tokenizer.from_str(given["tokenizer"])
    inner.no_truncation()
    inner.no_padding()
    inner.encode_special_tokens = given["special_as_text"]
    encodings = inner.encode_batch_fast(given["texts"], add_special_tokens=given["with_special"])
    json.dump({"ids": [encoding.ids for encoding in encodings]}, sys.stdout)


if __name__ == "__main__":
    main()
