"""The people, animals and places of one story, drawn at random but kept consistent."""

import random
from dataclasses import dataclass

from . import words
from .grammar import fill, pick


@dataclass(frozen=True, slots=True)
class Actor:
    """Someone in a story, with the pronouns that must agree with the name."""

    name: str
    kind: str
    is_female: bool
    home: str

    def slots(self, prefix: str) -> dict[str, str]:
        """Return the pronoun slots, each with `prefix` before its name."""
        female, male = ("she", "her", "her", "herself"), ("he", "him", "his", "himself")
        forms = female if self.is_female else male
        keys = ("he", "him", "his", "himself")
        return {prefix + key: form for key, form in zip(keys, forms, strict=True)}


@dataclass(frozen=True, slots=True)
class Cast:
    """Everything a plot may refer to."""

    hero: Actor
    friend: Actor
    elder: Actor
    trait: str
    setting: words.Setting
    season: str
    slots: dict[str, str]


def draw_person(rng: random.Random) -> Actor:
    """Return a human child or young adult."""
    is_female = rng.random() < 0.5
    name = pick(rng, words.GIRLS if is_female else words.BOYS)
    kind = pick(rng, words.GIRL_KINDS if is_female else words.BOY_KINDS)
    return Actor(name, kind, is_female, "in " + pick(rng, words.HOUSES))


def draw_friend(rng: random.Random) -> Actor:
    """Return a girl, a boy or an animal with the name of a friend."""
    is_female = rng.random() < 0.5
    if rng.random() < 0.35:
        name = pick(rng, words.FRIEND_GIRLS if is_female else words.FRIEND_BOYS)
        return Actor(name, "girl" if is_female else "boy", is_female, "")
    name = pick(rng, words.FRIEND_ANIMALS_F if is_female else words.FRIEND_ANIMALS_M)
    return Actor(name, pick(rng, words.ANIMALS).noun, is_female, "")


def draw_animal(rng: random.Random, noun: str = "") -> Actor:
    """Return an animal, of the kind `noun` where one is given."""
    is_female = rng.random() < 0.5
    animals = [a for a in words.ANIMALS if a.noun == noun] or words.ANIMALS
    animal = pick(rng, animals)
    name = pick(rng, words.ANIMAL_NAMES_F if is_female else words.ANIMAL_NAMES_M)
    return Actor(name, animal.noun, is_female, f"in a [snug|cosy|warm] {animal.den}")


def draw_elder(rng: random.Random) -> Actor:
    """Return an older person with a trade."""
    is_female = rng.random() < 0.5
    name = pick(rng, words.ELDERS_F if is_female else words.ELDERS_M)
    return Actor(name, pick(rng, words.JOBS), is_female, "")


def draw_cast(
    rng: random.Random, hero: Actor | None = None, trait: str = "", friend: Actor | None = None
) -> Cast:
    """Draw a whole cast; `hero`, `trait` and `friend` fix those parts of it."""
    if hero is None:
        hero = draw_person(rng) if rng.random() < 0.55 else draw_animal(rng)
    friend = friend or hero
    while friend.name == hero.name or friend.kind == hero.kind:
        friend = draw_friend(rng)
    elder = draw_elder(rng)
    trait = trait or pick(rng, words.TRAITS)
    setting = pick(rng, words.SETTINGS)
    season = pick(rng, words.SEASONS)
    spots = rng.sample(setting.spots, 3)
    slots = {
        **hero.slots(""),
        **friend.slots("f"),
        **elder.slots("e"),
        "hero": hero.name,
        "kind": hero.kind,
        "friend": friend.name,
        "fkind": friend.kind,
        "elder": elder.name,
        "job": elder.kind,
        "trait": trait,
        "season": season,
        "at": setting.at,
        "region": setting.region,
        "spot1": spots[0],
        "spot2": spots[1],
        "spot3": spots[2],
        "home": fill(rng, hero.home, {}),
        "scene": fill(rng, pick(rng, words.SCENES[season]), {}),
        "day": pick(rng, words.PARTS_OF_DAY),
        "thing": pick(rng, words.TREASURES),
        "machine": pick(rng, words.MACHINES),
        "gift": pick(rng, words.GIFTS),
        "crop": pick(rng, words.CROPS),
        "fruit": pick(rng, words.FRUITS),
        "treat": pick(rng, words.TREATS),
        "skill": pick(rng, words.SKILLS),
        "colour": pick(rng, words.COLOURS),
        "sad": pick(rng, words.SAD),
        "glad": pick(rng, words.GLAD),
    }
    return Cast(hero, friend, elder, trait, setting, season, slots)
