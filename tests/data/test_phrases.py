from __future__ import annotations

import hashlib
import re
from time import strptime
from typing import Any

import pytest

from tensorgrad.data.phrases import english_number, german_number, phrases
from tensorgrad.errors import ArgumentError

NUMBERS = {
    0: ("null", "zero"),
    1: ("eins", "one"),
    12: ("zwölf", "twelve"),
    17: ("siebzehn", "seventeen"),
    20: ("zwanzig", "twenty"),
    21: ("einundzwanzig", "twenty-one"),
    30: ("dreißig", "thirty"),
    76: ("sechsundsiebzig", "seventy-six"),
    100: ("einhundert", "one hundred"),
    101: ("einhunderteins", "one hundred and one"),
    342: ("dreihundertzweiundvierzig", "three hundred and forty-two"),
    1000: ("eintausend", "one thousand"),
    2007: ("zweitausendsieben", "two thousand and seven"),
    21_500: ("einundzwanzigtausendfünfhundert", "twenty-one thousand five hundred"),
    999_999: (
        "neunhundertneunundneunzigtausendneunhundertneunundneunzig",
        "nine hundred and ninety-nine thousand nine hundred and ninety-nine",
    ),
}


@pytest.mark.parametrize("n", NUMBERS)
def test_numbers_in_words(n: int) -> None:
    assert (german_number(n), english_number(n)) == NUMBERS[n]


def test_one_before_a_noun() -> None:
    assert german_number(1, before_noun=True) == "ein"
    assert german_number(201, before_noun=True) == "zweihundertein"
    assert german_number(21, before_noun=True) == "einundzwanzig"


def test_numbers_differ() -> None:
    numbers = range(0, 1_000_000, 37)
    for words in (german_number, english_number):
        assert len({words(n) for n in numbers}) == len(numbers)


def test_phrases_are_new_on_both_sides_and_always_the_same() -> None:
    pairs = list(phrases(3000))
    for side in (0, 1):
        assert len({pair[side] for pair in pairs}) == 3000
    assert list(phrases(100)) == pairs[:100]
    assert list(phrases(100, seed=1)) != pairs[:100]
    assert list(phrases(0)) == []
    text = "".join(f"{german}\t{english}\n" for german, english in pairs)
    assert hashlib.sha256(text.encode()).hexdigest().startswith("03a024d47b232df6")


def test_phrases_are_well_formed() -> None:
    pairs = list(phrases(3000))
    for german, english in pairs:
        for text in (german, english):
            assert text == " ".join(text.split())
            assert "{" not in text
            assert not re.search(r",[.?]|,,", text)
        assert german[-1] in ".?" or german == german.lower()
        assert (german[-1] in ".?") == (english[-1] in ".?")
    together = dict(pairs)
    words = {word for german in together for word in german.split()}
    assert {"Montag,", "halb", "Viertel", "Euro", "Uhr", "kostet"} <= words


def test_dates_and_times_say_the_same_in_both_languages() -> None:
    digits = re.compile(r"um (\d+):(\d\d) Uhr")
    seen = 0
    for german, english in phrases(3000):
        if found := digits.search(german):
            hour, minute = int(found[1]), found[2]
            half = "am" if hour < 12 else "pm"
            assert f"at {hour % 12 or 12}:{minute} {half}" in english
            seen += 1
        if found := re.search(r"(\d+)\. (\w+)", german):
            date = re.search(rf"\b([A-Z]\w+) {found[1]}\b", english)
            assert date
            strptime(f"2023 {date[1]} {found[1]}", "%Y %B %d")  # the month has such a day
            seen += 1
    assert seen > 200


def test_a_count_that_never_comes_down_to_0_is_refused() -> None:
    with pytest.raises(ArgumentError, match="count is -1"):
        next(phrases(-1))
    half: Any = 1.5
    with pytest.raises(ArgumentError, match=r"count is 1\.5, expected an integer"):
        next(phrases(half))
