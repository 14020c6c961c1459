from __future__ import annotations

import pytest
import tokenizers
from tokenizers import pre_tokenizers

from tensorgrad.data.word_patterns import GPT2, LINEAR, problem_of

PUBLISHED = [
    *sorted(LINEAR),
    r"\s+$",  # DeepSeek
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿ]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",  # noqa: RUF001
    r"[一-龥ࠀ-一가-퟿]+",
    r""" ?[^(\s|[.,!?…。，、।۔،])]+""",  # noqa: RUF001  BLOOM
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "[0-9][0-9][0-9]",  # Falcon
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    r"[\p{Han}]+|[\p{Lu}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{M}&&[^\p{Han}]]+(?i:'s|'t)?",
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))",
    *(r" {2,}", r"\d", "[\r\n]", r"\w+|[^\w\s]+", "(?:ab)+", "(?:\\p{L}\\p{M}*)+", "[^\\n]+|\\n"),
]
UNSAFE = [
    *("(a+)+$", "(a|aa)+$", "(a*)*b", "(?:a+){10}b", "(?:x+x+)+y", r"(\w+\s?)*$", "(a|b|ab)*c"),
    *(r"\s*\s*x", "a.*b.*c", "a*a*a*b", "(?=.*x)(?=.*y).*z", "a{1,3}+b", "((a?){30}){30}b"),
    *("(?:a?){1000}b", "(?:a+b?){100,}", "a{9999}", "(((a{1,100}){1,100}){1,100}){1,100}b"),
    *("(.*)\\1x", r"(?<x>a\g<x>?b?)", "(?~abc)", "(?(1)a|b)", "(?{x})", "(*FAIL)", r"a\Kb"),
    *("(?x) ( a + ) + b", "[]a](a+)+b]", "(?#(a", "(a", "a)", "[a", "*a", "a" * 10_001),
    "(" * 30 + "a" + ")" * 30,
    r"\p{L}{0,60}\p{L}{0,60}[a-z]*[0-9]",
]


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_patterns_of_published_models_are_allowed(pattern: str) -> None:
    assert problem_of(pattern) == ""
    tokenizers.Regex(pattern)  # the library reads it


@pytest.mark.parametrize("pattern", UNSAFE)
def test_patterns_that_may_take_long_are_refused(pattern: str) -> None:
    assert problem_of(pattern)


@pytest.mark.parametrize("text", [" " * 50_000 + "x", "A" * 50_000, "\n \n" * 20_000])
def test_linear_patterns_take_linear_time(text: str) -> None:
    for pattern in LINEAR - {GPT2}:
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
        assert split.pre_tokenize_str(text)
