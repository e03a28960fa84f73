"""Scripted conversations: the part of the training text that teaches the chat template.

Everything here is generated from small tables written for this repository, so it carries the
repository's own licence. The tasks are simple on purpose: a model of a few million parameters can
answer them, so a reader of the demo sees at once whether the served text makes sense.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Japan": "Tokyo",
    "China": "Beijing", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen",
    "Poland": "Warsaw", "Austria": "Vienna", "Greece": "Athens", "Portugal": "Lisbon", "Ireland": "Dublin",
    "Egypt": "Cairo", "Kenya": "Nairobi", "Peru": "Lima", "Chile": "Santiago", "Cuba": "Havana",
    "Canada": "Ottawa", "Mexico": "Mexico City", "Russia": "Moscow", "Turkey": "Ankara", "India": "New Delhi",
    "Nepal": "Kathmandu", "Thailand": "Bangkok", "Vietnam": "Hanoi", "Hungary": "Budapest", "Iceland": "Reykjavik",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "light": "dark", "high": "low", "old": "young", "wet": "dry",
    "happy": "sad", "rich": "poor", "early": "late", "strong": "weak", "open": "closed", "full": "empty",
    "hard": "soft", "near": "far", "loud": "quiet", "clean": "dirty", "brave": "afraid", "wide": "narrow",
    "sweet": "bitter", "thick": "thin", "deep": "shallow", "sharp": "dull", "new": "old", "tall": "short",
}  # fmt: skip
SOUNDS = {
    "dog": "barks", "cat": "purrs", "cow": "moos", "sheep": "bleats", "horse": "neighs", "lion": "roars",
    "wolf": "howls", "owl": "hoots", "duck": "quacks", "frog": "croaks", "bee": "buzzes", "pig": "grunts",
    "mouse": "squeaks", "snake": "hisses", "crow": "caws", "bear": "growls",
}  # fmt: skip
COLOURS = {
    "the sky": "blue", "grass": "green", "snow": "white", "coal": "black", "a lemon": "yellow", "blood": "red",
    "a carrot": "orange", "an elephant": "grey", "chocolate": "brown", "a leaf": "green", "milk": "white",
    "the sun": "yellow", "a ripe tomato": "red", "the sea": "blue",
}  # fmt: skip
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
          "November", "December"]  # fmt: skip
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
           "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
           "twenty"]  # fmt: skip
WORDS = ["river", "stone", "candle", "garden", "winter", "summer", "bridge", "letter", "silver", "forest", "mirror",
         "basket", "window", "ladder", "kettle", "hammer", "button", "pencil", "island", "harbor", "meadow",
         "orange", "planet", "rocket", "saddle", "ticket", "velvet", "wagon", "anchor", "bottle"]  # fmt: skip

ANIMALS = ["fox", "bear", "rabbit", "mouse", "owl", "wolf", "horse", "goat", "duck", "frog", "cat", "dog", "crow",
           "otter", "hedgehog", "badger", "squirrel", "turtle", "lamb", "goose", "donkey", "beaver"]  # fmt: skip
THINGS = ["lantern", "red ball", "silver key", "wooden boat", "golden ring", "blue kite", "little bell", "warm coat",
          "magic stone", "old map", "brass whistle", "green hat", "loaf of bread", "jar of honey", "paper star",
          "broken clock", "small drum", "long rope", "glass bottle", "white feather"]  # fmt: skip
NAMES = ["Tom", "Anna", "Ben", "Lucy", "Max", "Ella", "Sam", "Rose", "Jack", "Mary", "Will", "Clara", "Hugo", "Ruth",
         "Peter", "Nell"]  # fmt: skip
PLACES = ["in the forest", "by the river", "on a hill", "near the sea", "in a small village", "under an old oak tree",
          "beside a mill", "in a quiet valley", "at the edge of a lake", "behind the barn"]  # fmt: skip
WEATHER = ["the sun was shining", "it was raining hard", "snow was falling", "the wind was blowing",
           "the sky was full of stars", "the morning was cold", "the day was warm"]  # fmt: skip
TRAITS = ["kind", "clever", "lonely", "brave", "hungry", "curious", "shy", "cheerful"]
ENDINGS = [
    "From that day on they were the best of friends.",
    "And they all lived happily ever after.",
    "That night they slept well, and the {thing} was safe.",
    "The {animal} never forgot that day.",
]


@dataclass(frozen=True)
class Turn:
    """One question and its answer, both plain text."""

    task: str
    user: str
    assistant: str


def _article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def _story(rng: random.Random) -> Turn:
    animal, thing = rng.choice(ANIMALS), rng.choice(THINGS)
    name, place, weather, trait = (
        rng.choice(NAMES),
        rng.choice(PLACES),
        rng.choice(WEATHER),
        rng.choice(TRAITS),
    )
    helper = rng.choice([a for a in ANIMALS if a != animal])
    request = f"Tell me a story about {_article(animal)} and {_article(thing)}."
    if rng.random() < 0.3:
        request = f"Tell me a story about {name}, {_article(animal)} and {_article(thing)}."
        opening = f"Once upon a time, {name} had {_article(animal)} who was very {trait}. They lived {place}."
    else:
        opening = f"Once upon a time there was a {trait} {animal} named {name}. {name} lived {place}."
    found = rng.choice(
        [
            f"One day, when {weather}, {name} found {_article(thing)}.",
            f"One day {weather}, and {name} lost the {thing}.",
            f"One day {weather}, and someone had hidden the {thing}.",
        ]
    )
    if "found" in found:
        middle = (
            f'"Whose {thing} is this?" said {name}. "It is mine," said {_article(helper)}. '
            f"So {name} gave the {thing} back to the {helper}, and the {helper} was very happy."
        )
    else:
        middle = (
            f"{name} looked everywhere, but the {thing} was gone. Then {_article(helper)} came by. "
            f'"I will help you," said the {helper}. Together they looked {rng.choice(PLACES)}, '
            f"and there they found the {thing}."
        )
    ending = rng.choice(ENDINGS).format(thing=thing, animal=animal)
    return Turn("story", request, f"{opening} {found} {middle} {ending}")


def _capital(rng: random.Random) -> Turn:
    country = rng.choice(list(CAPITALS))
    ask = rng.choice(
        ["What is the capital of {}?", "Which city is the capital of {}?", "Name the capital of {}."]
    )
    return Turn("fact", ask.format(country), f"The capital of {country} is {CAPITALS[country]}.")


def _opposite(rng: random.Random) -> Turn:
    word = rng.choice(list(OPPOSITES))
    ask = rng.choice(
        ["What is the opposite of {}?", "Give me the opposite of {}.", "Which word means the opposite of {}?"]
    )
    return Turn("fact", ask.format(word), f"The opposite of {word} is {OPPOSITES[word]}.")


def _sound(rng: random.Random) -> Turn:
    animal = rng.choice(list(SOUNDS))
    ask = rng.choice(["What sound does a {} make?", "What does a {} do when it makes a sound?"])
    return Turn("fact", ask.format(animal), f"A {animal} {SOUNDS[animal]}.".replace("A owl", "An owl"))


def _colour(rng: random.Random) -> Turn:
    thing = rng.choice(list(COLOURS))
    ask = rng.choice(["What colour is {}?", "Tell me the colour of {}."])
    return Turn("fact", ask.format(thing), f"{thing[0].upper()}{thing[1:]} is {COLOURS[thing]}.")


def _next(rng: random.Random) -> Turn:
    table, unit = rng.choice([(DAYS, "day"), (MONTHS, "month")])
    index = rng.randrange(len(table))
    step, word = rng.choice([(1, "after"), (-1, "before")])
    answer = table[(index + step) % len(table)]
    return Turn(
        "fact", f"Which {unit} comes {word} {table[index]}?", f"{answer} comes {word} {table[index]}."
    )


def _count(rng: random.Random) -> Turn:
    start, length = rng.randrange(0, 14), rng.randrange(3, 8)
    span = list(range(start, min(start + length, 20) + 1))
    if rng.random() < 0.5:
        span.reverse()
        ask = f"Count down from {NUMBERS[span[0]]} to {NUMBERS[span[-1]]}."
    else:
        ask = f"Count from {NUMBERS[span[0]]} to {NUMBERS[span[-1]]}."
    text = ", ".join(NUMBERS[n] for n in span)
    return Turn("count", ask, f"{text[0].upper()}{text[1:]}.")


def _add(rng: random.Random) -> Turn:
    left, right = rng.randrange(0, 11), rng.randrange(0, 11)
    text = f"{NUMBERS[left]} plus {NUMBERS[right]}"
    return Turn("count", f"What is {text}?", f"{text[0].upper()}{text[1:]} is {NUMBERS[left + right]}.")


def _spell(rng: random.Random) -> Turn:
    word = rng.choice(WORDS)
    ask = rng.choice(["Spell the word {}.", "How do you spell {}?"])
    return Turn("spell", ask.format(word), f"{'-'.join(word.upper())}.")


def _list(rng: random.Random) -> Turn:
    count = rng.randrange(3, 6)
    kind, table = rng.choice([("animals", ANIMALS), ("days of the week", DAYS), ("months", MONTHS)])
    if kind == "animals":
        start = rng.randrange(len(table) - count)
        items = [f"the {a}" for a in table[start : start + count]]
    else:
        items = table[:count]
    text = ", ".join(items[:-1]) + " and " + items[-1]
    return Turn("count", f"Name {NUMBERS[count]} {kind}.", f"{text[0].upper()}{text[1:]}.")


TASKS: tuple[tuple[float, Callable[[random.Random], Turn]], ...] = (
    (0.70, _story), (0.05, _capital), (0.04, _opposite), (0.03, _sound), (0.03, _colour), (0.03, _next),
    (0.05, _count), (0.04, _add), (0.01, _spell), (0.02, _list),
)  # fmt: skip


def held_out(key: str, share: float) -> bool:
    """True for a fixed, seed-independent share (0..1) of keys: the split never depends on order."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") < share * 2**32


def turns(count: int, seed: int, *, test: bool, share: float = 0.05) -> list[Turn]:
    """`count` conversations whose *question* lies in the training or in the held-out split."""
    rng = random.Random(seed)
    weights = [weight for weight, _ in TASKS]
    makers = [maker for _, maker in TASKS]
    out: list[Turn] = []
    while len(out) < count:
        turn = rng.choices(makers, weights)[0](rng)
        if held_out(turn.user, share) == test:
            out.append(turn)
    return out
