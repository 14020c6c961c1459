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


NESTED = "a repetition in a repetition is followed by what may not match"
TWO = "two repetitions without a limit are followed by what may not match"
SEVERAL = "what may match in several ways is repeated more than once"
MANY = "a part is repeated more than 1,000 times"


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("(a+)+$", NESTED), ("(?:a?)+b", NESTED), ("(?:a?)+", ""), (r"(?:\b)+x", NESTED),
        ("^*a", NESTED), ("a{1,3}+b", NESTED), ("a{1}*b", ""), ("(?:a+)?b", ""),
        ("a*b*c", TWO), ("a{2,}b*c", TWO), ("a*?b*c", TWO), ("[[a]b]*c*d", TWO),
        ("(?:a*|b)c*d", TWO), ("(?:a+)??b*c", TWO), ("(?=a*b)c*d", TWO), ("(?:a*|b*)c", ""),
        ("a*+b*c", ""), ("a++b*c", ""), ("a{2,}b*+c", ""), ("(?>a*)b*c", ""), ("a{3}b*c", ""),
        ("(?:a+){10}b", SEVERAL), ("(?:a?){2}", SEVERAL), ("(?:a*b){2}", SEVERAL),
        ("(?:a?){1}b", ""), ("(?:ab){1000}", ""),
        ("a{1000}", ""), ("a{1001}", MANY), ("a{,1001}", MANY), ("a{1,1001}", MANY),
        ("a{1,64}c*b", ""), ("a{0,64}c*b", "its parts may match in more than 64 ways"),
        ("a{1,64}b{1,64}", ""), ("a{1,64}b{1,65}", "its parts may match in more than 4,096 ways"),
        ("(" * 20 + "a" + ")" * 20, ""),
        ("(" * 21 + "a" + ")" * 21, "groups are nested more than 20 deep"),
        ("a" * 10_000, ""), ("a" * 10_001, "it has 10,001 characters, expected at most 10,000"),
        ("(a", "a ( is not closed"), ("a|b)", "a ) closes no group"), ("[a", "a [ is not closed"),
        ("[]a]", "a class begins with ]"), ("*a", "'*' repeats nothing, or a repetition"),
        ("(?#a)", "'(?#a' is not supported"), (r"\1x", r"'\\1x' is not supported"),
        ("a{}b", "'{}' is not supported"), ("a{,}b", "'{,}' is not supported"), ("a{b", ""),
        (r"\x{41}\x41\u0041", ""), ("(?i-m:a)(?<n>a)", ""),
    ],
    ids=str,
)  # fmt: skip
def test_the_reason_is_named_and_bounds_are_allowed(pattern: str, problem: str) -> None:
    assert problem_of(pattern) == problem


@pytest.mark.parametrize("text", [" " * 50_000 + "x", "A" * 50_000, "\n \n" * 20_000])
def test_linear_patterns_take_linear_time(text: str) -> None:
    for pattern in LINEAR - {GPT2}:
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
        assert split.pre_tokenize_str(text)
