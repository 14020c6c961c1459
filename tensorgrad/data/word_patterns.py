"""Regular expressions that split text into words, and which of them take too long.

The tokenizers library matches them by Oniguruma, which backtracks: `(a+)+$` takes 2^n steps for n
letters, and `\\s*\\s*x` n^3 for n spaces. Steps are repeated where something that may match in
several ways is followed by something that may fail. So of the parts of a pattern this counts those
that may end at any character and are followed by such a part: more than one is an error, and one
whose repetitions themselves may match in several ways. What is left takes n^2 steps at most.

Tests: tests/data/test_word_patterns.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_END = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# Patterns of published models that take n steps: what one part leaves the next ones match.
LINEAR = {
    GPT2,
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_END}",  # Qwen
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_END}",  # Llama 3
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}?|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}

_LONGEST = 10_000  # characters of a pattern
_DEEPEST = 20  # groups in groups
_WAYS = 64  # in which bounded parts may match
_GROUP = re.compile(r"\(\?(?:[im]*(?:-[im]+)?:|>|=|!|<=|<!|<\w+>)|\((?![?*])")
_AROUND = {"(?=", "(?!", "(?<=", "(?<!"}
_REPEAT = re.compile(
    r"(?P<sign>[*+?])(?P<mode>[+?]?)|\{(?P<low>\d*)(?P<comma>,?)(?P<high>\d*)\}\??"
)
_ESCAPE = re.compile(
    r"\\(?:[pP]\{\^?\w+\}|x\{[0-9a-fA-F]+\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[^kgcCMKXRyY\d])"
)
_IN_CLASS = re.compile(r"\\.?|\[\^?|.", re.S)
_ZERO_WIDTH = ("\\b", "\\B", "\\A", "\\z", "\\Z", "\\G")


class _Unsafe(Exception):
    """A pattern that may take too long, or that is not understood."""


class _Part(NamedTuple):
    """A part of a pattern.

    Attributes:
        may_fail: whether it does not match everywhere.
        open: how many of its parts may end at any character.
        fixed: how many of these are followed, inside the part, by one that may fail.
        ways: in which its bounded parts may match.
        nested: whether repetitions in it may match in several ways.
        width: whether it has one or more characters, as opposed to an assertion.
    """

    may_fail: bool = True
    open: int = 0
    fixed: int = 0
    ways: int = 1
    nested: bool = False
    width: bool = True


def problem_of(pattern: str) -> str:
    """Return why a pattern is refused; "" for one that takes n^2 steps at most for n characters."""
    if pattern in LINEAR:
        return ""
    if len(pattern) > _LONGEST:
        return f"it has {len(pattern):,} characters, expected at most {_LONGEST:,}"
    try:
        parser = _Parser(pattern)
        found = parser.alternatives(0)
        if parser.place < len(pattern):
            raise _Unsafe("a ) closes no group")
        _check(found)
    except _Unsafe as error:
        return str(error)
    return ""


@dataclass
class _Parser:
    """Reads a pattern from left to right."""

    pattern: str
    place: int = 0

    def alternatives(self, depth: int) -> _Part:
        """Read up to the end of a group; return the group."""
        if depth > _DEEPEST:
            raise _Unsafe(f"groups are nested more than {_DEEPEST} deep")
        branches = [self._sequence(depth)]
        while self.pattern.startswith("|", self.place):
            self.place += 1
            branches.append(self._sequence(depth))
        return _Part(
            may_fail=all(branch.may_fail for branch in branches),
            open=max(branch.open for branch in branches),
            fixed=max(branch.fixed for branch in branches),
            ways=sum(branch.ways for branch in branches),
            nested=any(branch.nested for branch in branches),
            width=any(branch.width for branch in branches),
        )

    def _sequence(self, depth: int) -> _Part:
        parts = []
        while self.place < len(self.pattern) and self.pattern[self.place] not in "|)":
            parts.append(self._repeated(self._one(depth)))
        return _joined(parts)

    def _one(self, depth: int) -> _Part:
        """Read a character, a class, an assertion or a group."""
        letter = self.pattern[self.place]
        if letter == "(":
            return self._group(depth)
        if letter == "[":
            self._class()
            return _Part()
        if letter == "\\":
            found = _ESCAPE.match(self.pattern, self.place)
            if not found:
                raise _Unsafe(f"{self.pattern[self.place : self.place + 3]!r} is not supported")
            self.place = found.end()
            return _Part(width=found[0] not in _ZERO_WIDTH)
        if letter in "*+?{" and (letter != "{" or _REPEAT.match(self.pattern, self.place)):
            raise _Unsafe(f"{letter!r} repeats nothing, or a repetition")
        self.place += 1
        return _Part(width=letter not in "^$")

    def _group(self, depth: int) -> _Part:
        opened = _GROUP.match(self.pattern, self.place)
        if not opened:
            raise _Unsafe(f"{self.pattern[self.place : self.place + 4]!r} is not supported")
        self.place = opened.end()
        inner = self.alternatives(depth + 1)
        if not self.pattern.startswith(")", self.place):
            raise _Unsafe("a ( is not closed")
        self.place += 1
        if opened[0] in _AROUND:
            _check(inner)
            # Its steps are repeated wherever those of the parts before it are.
            return _Part(open=inner.fixed, fixed=inner.fixed, ways=inner.ways, width=False)
        if opened[0] == "(?>":
            _check(inner)
            return inner._replace(open=inner.fixed, ways=1, nested=False)
        return inner

    def _class(self) -> None:
        """Read a class of characters, which may have classes in it."""
        depth = 0
        for found in _IN_CLASS.finditer(self.pattern, self.place):
            if found[0].startswith("["):
                depth += 1
                if self.pattern.startswith("]", found.end()):
                    raise _Unsafe("a class begins with ]")
            depth -= found[0] == "]"
            if not depth:
                self.place = found.end()
                return
        raise _Unsafe("a [ is not closed")

    def _repeated(self, part: _Part) -> _Part:
        """Read how often a part is repeated, if it is; {1,3}+ repeats a repetition."""
        while found := _REPEAT.match(self.pattern, self.place):
            self.place = found.end()
            part = self._times(part, found)
        return part

    @staticmethod
    def _times(part: _Part, found: re.Match[str]) -> _Part:
        """Return a repeated part."""
        sign = found["sign"]
        low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(sign, (0, None))
        if sign is None:
            if not found["low"] and not found["high"]:
                raise _Unsafe(f"{found[0]!r} is not supported")
            low = int(found["low"] or 0)
            most = found["high"] or ("" if found["comma"] else found["low"])
            high = int(most) if most else None
            if max(low, high or 0) > 1000:
                raise _Unsafe("a part is repeated more than 1,000 times")
        may_fail = part.may_fail and low > 0
        if (low, high) == (1, 1):
            return part
        many = part.ways > 1 or part.open > 0 or part.nested
        if sign and found["mode"] == "+":
            _check(part)
            return part._replace(may_fail=may_fail, open=part.fixed, ways=1, nested=False)
        if high == 1:
            return part._replace(may_fail=may_fail, ways=part.ways + 1)
        if many and low > 1:
            raise _Unsafe("what may match in several ways is repeated more than once")
        if many or not part.width:
            return part._replace(may_fail=may_fail, nested=True)
        if high is None:
            return part._replace(may_fail=may_fail, open=1)
        return part._replace(may_fail=may_fail, ways=high - low + 1)


def _joined(parts: list[_Part]) -> _Part:
    """Return a sequence of parts."""
    fixed, ways, fails = 0, 1, False
    for part in reversed(parts):
        fixed += part.open if fails else part.fixed
        ways *= part.ways
        if fails and part.nested:
            raise _Unsafe("a repetition in a repetition is followed by what may not match")
        fails = fails or part.may_fail
    return _Part(
        may_fail=fails,
        open=max(fixed, sum(part.open for part in parts)),
        fixed=fixed,
        ways=min(ways, 1 << 20),
        nested=any(part.nested for part in parts),
        width=any(part.width for part in parts),
    )


def _check(part: _Part) -> None:
    """Raise _Unsafe where a part takes more than n^2 steps for n characters."""
    if part.fixed > 1:
        raise _Unsafe("two repetitions without a limit are followed by what may not match")
    most = _WAYS if part.fixed else _WAYS**2
    if part.ways > most:
        raise _Unsafe(f"its parts may match in more than {most:,} ways")
