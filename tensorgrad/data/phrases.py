"""Synthetic German phrases about numbers, dates, times and prices, with English translations.

    Der Zug fährt am dritten Mai um halb vier ab.
    The train leaves at half past three on the third of May.

They need what translation needs: another word order (einundzwanzig, twenty-one), one word for
several, digits to copy or convert, and known parts in new combinations. There are millions of
phrases, so held-out ones are new.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from tensorgrad.core.checks import check_integer

Pair = tuple[str, str]  # German, English


def _words(text: str) -> list[str]:
    return text.split()


_UNITS_DE = _words(
    "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn "
    "fünfzehn sechzehn siebzehn achtzehn neunzehn"
)
_UNITS_EN = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
)
_TENS_DE = _words("zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig")
_TENS_EN = _words("twenty thirty forty fifty sixty seventy eighty ninety")
_MONTHS_DE = _words(
    "Januar Februar März April Mai Juni Juli August September Oktober November Dezember"
)
_MONTHS_EN = _words(
    "January February March April May June July August September October November December"
)
_DAYS_DE = _words("Montag Dienstag Mittwoch Donnerstag Freitag Samstag Sonntag")
_DAYS_EN = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
_LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)

_ORDINALS_DE = {1: "ersten", 3: "dritten", 7: "siebten", 8: "achten"}  # after "am"
_ORDINALS_EN = {1: "first", 2: "second", 3: "third", 5: "fifth", 8: "eighth", 9: "ninth"}
_ORDINALS_EN |= {12: "twelfth", 20: "twentieth", 30: "thirtieth"}

_THINGS = (  # with a price
    ("Das Buch", "The book"), ("Die Lampe", "The lamp"), ("Der Tisch", "The table"),
    ("Das Fahrrad", "The bicycle"), ("Die Fahrkarte", "The ticket"), ("Der Mantel", "The coat"),
    ("Das Zimmer", "The room"), ("Die Kamera", "The camera"), ("Der Stuhl", "The chair"),
    ("Das Essen", "The meal"), ("Die Uhr", "The watch"), ("Der Koffer", "The suitcase"),
)  # fmt: skip
_COUNTED = (  # in the plural
    ("Äpfel", "apples"), ("Kinder", "children"), ("Häuser", "houses"), ("Bücher", "books"),
    ("Menschen", "people"), ("Kilometer", "kilometres"), ("Tage", "days"), ("Karten", "tickets"),
    ("Schüler", "pupils"), ("Bäume", "trees"), ("Seiten", "pages"), ("Stunden", "hours"),
)  # fmt: skip
_EVENTS = (  # German around a time, English before it
    ("Der Zug fährt {} ab.", "The train leaves {}."),
    ("Der Bus kommt {} an.", "The bus arrives {}."),
    ("Wir treffen uns {}.", "We meet {}."),
    ("Der Film beginnt {}.", "The film starts {}."),
    ("Der Laden schließt {}.", "The shop closes {}."),
    ("Sie ruft uns {} an.", "She calls us {}."),
    ("Das Konzert endet {}.", "The concert ends {}."),
    ("Ich habe {} einen Termin.", "I have an appointment {}."),
    ("Können wir {} essen?", "Can we eat {}?"),
)
_DATED = (
    ("Die Prüfung ist {}.", "The exam is {}."),
    ("Er hat {} Geburtstag.", "His birthday is {}."),
    ("Wir fahren {} nach Berlin.", "We travel to Berlin {}."),
    ("Sie wurde {} geboren.", "She was born {}."),
    ("Das Museum wurde {} eröffnet.", "The museum was opened {}."),
    ("Der Brief kam {} an.", "The letter arrived {}."),
)
_NUMBERED = (
    ("Es sind noch {}.", "There are {} left."),
    ("Ich sehe {}.", "I see {}."),
    ("Wir haben {} gezählt.", "We counted {}."),
    ("Im Dorf gibt es {}.", "There are {} in the village."),
    ("Das sind mehr als {}.", "That is more than {}."),
)
_PAID = (
    ("Ich habe {} bezahlt.", "I paid {}."),
    ("Er schuldet mir {}.", "He owes me {}."),
    ("Das macht zusammen {}.", "That makes {} altogether."),
)


def phrases(count: int, seed: int = 0) -> Iterator[Pair]:
    """Yield phrases, no two of which have the same German or the same English.

    Args:
        count: the number of phrases; more than 100,000 take long.
        seed: equal seeds give equal phrases in equal order.

    Yields:
        German and English text.

    Raises:
        ArgumentError: count is negative or not an integer.

    Example:
        >>> from tensorgrad.data import phrases
        >>> next(phrases(1))
        ('Das Zimmer kostet neun Euro und sechsundsechzig Cent.',
         'The room costs nine euros and sixty-six cents.')
    """
    check_integer("phrases", "count", count, 0)
    rng = random.Random(seed)
    kinds: tuple[Callable[[random.Random], Pair], ...] = (
        _number_alone, _number_phrase, _event, _event, _dated, _dated_event, _priced, _paid,
    )  # fmt: skip
    seen: set[str] = set()
    while count:
        german, english = rng.choice(kinds)(rng)
        if german not in seen and english not in seen:
            seen |= {german, english}
            count -= 1
            yield german, english


def german_number(n: int, before_noun: bool = False) -> str:
    """Return a number from 0 to 999,999 in words: 21 is einundzwanzig.

    Args:
        n: the number.
        before_noun: whether a noun follows: then one is "ein".
    """
    for size, word in ((1000, "tausend"), (100, "hundert")):
        if n >= size:
            rest = german_number(n % size, before_noun) if n % size else ""
            return f"{german_number(n // size, True)}{word}{rest}"
    if n >= 20:
        unit = f"{german_number(n % 10, True)}und" if n % 10 else ""
        return unit + _TENS_DE[n // 10 - 2]
    return "ein" if n == 1 and before_noun else _UNITS_DE[n]


def english_number(n: int) -> str:
    """Return a number from 0 to 999,999 in words: 121 is one hundred and twenty-one."""
    if n >= 1000:
        rest = n % 1000
        between = " and " if 0 < rest < 100 else " "
        return f"{english_number(n // 1000)} thousand" + between * (rest > 0) + _rest(rest)
    if n >= 100:
        return f"{_UNITS_EN[n // 100]} hundred" + " and " * (n % 100 > 0) + _rest(n % 100)
    if n >= 20:
        return _TENS_EN[n // 10 - 2] + "-" * (n % 10 > 0) + _rest(n % 10)
    return _UNITS_EN[n]


def _rest(n: int) -> str:
    return english_number(n) if n else ""


def _ordinals(day: int) -> Pair:
    """Return the ordinal of a day of the month, as it stands after "am" and "the"."""
    german = _ORDINALS_DE.get(day, german_number(day) + ("ten" if day < 20 else "sten"))
    if day in _ORDINALS_EN:
        return german, _ORDINALS_EN[day]
    if day > 20:
        return german, f"{_TENS_EN[day // 10 - 2]}-{_ordinals(day % 10)[1]}"
    return german, _UNITS_EN[day] + "th"


def _year(rng: random.Random) -> Pair:
    year = rng.randint(1901, 2029)
    if rng.random() < 0.5:
        return str(year), str(year)
    if year >= 2000:
        return german_number(year), english_number(year)
    after = year - 1900
    english = english_number(after) if after >= 10 else f"oh {_UNITS_EN[after]}"
    return f"neunzehnhundert{german_number(after)}", f"nineteen {english}"


def _date(rng: random.Random, with_year: bool) -> Pair:
    month = rng.randrange(12)
    day = rng.randint(1, _LENGTHS[month])
    if rng.random() < 0.5:
        german, english = f"{day}. {_MONTHS_DE[month]}", f"on {_MONTHS_EN[month]} {day}"
    else:
        words = _ordinals(day)
        german = f"{words[0]} {_MONTHS_DE[month]}"
        english = f"on the {words[1]} of {_MONTHS_EN[month]}"
    if with_year:
        year = _year(rng)
        return f"am {german} {year[0]}", f"{english}, {year[1]}"
    if rng.random() < 0.4:
        weekday = rng.randrange(7)
        english = english.removeprefix("on ")
        return f"am {_DAYS_DE[weekday]}, dem {german},", f"on {_DAYS_EN[weekday]}, {english}"
    return f"am {german}", english


def _time(rng: random.Random) -> Pair:
    if rng.random() < 0.4:
        hour, minute = rng.randrange(24), rng.randrange(60)
        half = "am" if hour < 12 else "pm"
        return f"um {hour}:{minute:02d} Uhr", f"at {(hour - 1) % 12 + 1}:{minute:02d} {half}"
    hour = rng.randint(1, 12)
    after = hour % 12 + 1
    german, english = german_number(hour), english_number(hour)
    minutes = rng.choice((5, 10, 20))
    of_day = rng.choice((("", ""), ("", ""), (" morgens", " in the morning")))
    part = rng.choice((
        (f"{german_number(hour, True)} Uhr", f"{english} o'clock"),
        (f"Viertel nach {german}", f"a quarter past {english}"),
        (f"halb {german_number(after)}", f"half past {english}"),
        (f"Viertel vor {german}", f"a quarter to {english}"),
        (f"{german_number(minutes)} nach {german}", f"{english_number(minutes)} past {english}"),
        (f"{german_number(minutes)} vor {german}", f"{english_number(minutes)} to {english}"),
    ))  # fmt: skip
    return f"um {part[0]}{of_day[0]}", f"at {part[1]}{of_day[1]}"


def _price(rng: random.Random) -> Pair:
    euros, cents = rng.randint(1, rng.choice((20, 100, 1000))), rng.randint(1, 99)
    form = rng.randrange(4)
    if form == 0:
        return f"{euros},{cents:02d} Euro", f"€{euros}.{cents:02d}"
    thousands = f"{euros + 1000:,}"
    if form == 1:
        return f"{thousands.replace(',', '.')} Euro", f"€{thousands}"
    german = f"{german_number(euros, True)} Euro"
    english = f"{english_number(euros)} euro" + "s" * (euros > 1)
    if form == 2:
        return german, english
    of_cents = f"{english_number(cents)} cent" + "s" * (cents > 1)
    return f"{german} und {german_number(cents, True)} Cent", f"{english} and {of_cents}"


def _number(rng: random.Random) -> int:
    return rng.randint(2, 10 ** rng.randint(2, 6) - 1)


def _number_alone(rng: random.Random) -> Pair:
    n = _number(rng)
    return german_number(n), english_number(n)


def _number_phrase(rng: random.Random) -> Pair:
    n, (german, english) = _number(rng), rng.choice(_COUNTED)
    if rng.random() < 0.5:
        said = f"{n:,}".replace(",", ".") + f" {german}", f"{n:,} {english}"
    else:
        said = f"{german_number(n, True)} {german}", f"{english_number(n)} {english}"
    return _filled(rng.choice(_NUMBERED), said)


def _event(rng: random.Random) -> Pair:
    return _filled(rng.choice(_EVENTS), _time(rng))


def _dated(rng: random.Random) -> Pair:
    place = rng.randrange(len(_DATED))
    return _filled(_DATED[place], _date(rng, with_year=place >= 3))


def _dated_event(rng: random.Random) -> Pair:
    date, time = _date(rng, with_year=False), _time(rng)
    return _filled(rng.choice(_EVENTS), (f"{date[0]} {time[0]}", f"{time[1]} {date[1]}"))


def _priced(rng: random.Random) -> Pair:
    (german, english), price = rng.choice(_THINGS), _price(rng)
    return f"{german} kostet {price[0]}.", f"{english} costs {price[1]}."


def _paid(rng: random.Random) -> Pair:
    return _filled(rng.choice(_PAID), _price(rng))


def _filled(frame: Pair, said: Pair) -> Pair:
    german = frame[0].format(said[0])
    return german.replace(",.", "."), frame[1].format(said[1])  # the comma after a weekday's date
