"""The word lists of the corpus."""

import random
from dataclasses import dataclass


def _words(text: str, sep: str | None = None) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(sep))


@dataclass(frozen=True, slots=True)
class Animal:
    """An animal that can act in a story: its noun, its home and its sound."""

    noun: str
    den: str
    sound: str
    young: str


@dataclass(frozen=True, slots=True)
class Setting:
    """A landscape: where a home lies in it, its name and the spots one can visit."""

    at: str
    region: str
    spots: tuple[str, ...]


# Heroes, friends and elders have names of their own: a small model then confuses them less.
GIRLS = _words("Mira Lena Anna Rosa Ivy Nora Lily Maya Clara June Ruby Hazel")
BOYS = _words("Tom Leo Finn Max Oscar Hugo Sam Ben Theo Jack Emil Noah")
FRIEND_GIRLS = _words("Ella Poppy Zoe Greta Luna Ada")
FRIEND_BOYS = _words("Otto Milo Felix Peter Toby Karl")
ANIMAL_NAMES_F = _words("Fern Willow Pip Daisy Misty Clover")
ANIMAL_NAMES_M = _words("Rusty Thorn Biscuit Flint Moss Rowan")
FRIEND_ANIMALS_F = _words("Bramble Tansy Juniper Pepper")
FRIEND_ANIMALS_M = _words("Bracken Barley Acorn Sorrel")
ELDERS_F = _words("Agnes Hilda Martha Vera")
ELDERS_M = _words("Bram Edwin Silas Harold")
NAMES = GIRLS + BOYS + FRIEND_GIRLS + FRIEND_BOYS
_ANIMAL_NAMES = ANIMAL_NAMES_F + ANIMAL_NAMES_M + FRIEND_ANIMALS_F + FRIEND_ANIMALS_M
STORY_NAMES = NAMES + _ANIMAL_NAMES + ELDERS_F + ELDERS_M

GIRL_KINDS = _words("girl,girl,girl,young woman,shepherd girl", ",")
BOY_KINDS = _words("boy,boy,boy,young man,shepherd boy", ",")
JOBS = _words(
    "baker miller fisher carpenter gardener teacher tailor blacksmith clockmaker potter weaver"
    " librarian beekeeper sailor painter shoemaker"
)

ANIMALS = (
    Animal("fox", "den", "bark", "cub"),
    Animal("rabbit", "burrow", "squeak", "kitten"),
    Animal("mouse", "hole", "squeak", "pup"),
    Animal("badger", "den", "growl", "cub"),
    Animal("hedgehog", "nest of leaves", "snuffle", "hoglet"),
    Animal("squirrel", "hollow tree", "chatter", "kit"),
    Animal("bear", "cave", "growl", "cub"),
    Animal("otter", "den", "whistle", "pup"),
    Animal("owl", "hollow tree", "hoot", "owlet"),
    Animal("duck", "nest", "quack", "duckling"),
    Animal("cat", "basket", "meow", "kitten"),
    Animal("dog", "kennel", "bark", "puppy"),
    Animal("frog", "hollow log", "croak", "tadpole"),
    Animal("goat", "shed", "bleat", "kid"),
    Animal("turtle", "hollow log", "hiss", "hatchling"),
    Animal("crow", "nest", "caw", "chick"),
    Animal("horse", "stable", "neigh", "foal"),
    Animal("lion", "cave", "roar", "cub"),
    Animal("hen", "henhouse", "cluck", "chick"),
    Animal("pig", "shed", "grunt", "piglet"),
    Animal("sheep", "stable", "bleat", "lamb"),
)

SETTINGS = (
    Setting(
        "at the edge of the forest",
        "the forest",
        _words("the stream,the old oak,the clearing,the mossy bridge,the fern bank", ","),
    ),
    Setting(
        "by the sea",
        "the shore",
        _words("the harbour,the beach,the lighthouse,the tall cliffs,the rock pools", ","),
    ),
    Setting(
        "at the foot of the mountain",
        "the mountain",
        _words("the waterfall,the high meadow,the stone bridge,the pine trees,the cave", ","),
    ),
    Setting(
        "in a quiet valley",
        "the valley",
        _words("the river,the mill,the orchard,the wooden gate,the barley field", ","),
    ),
    Setting(
        "on a green hill",
        "the hill",
        _words("the windmill,the stone wall,the pond,the apple tree,the sheep path", ","),
    ),
    Setting(
        "near a busy town",
        "the town",
        _words("the market,the fountain,the clock tower,the park,the library", ","),
    ),
    Setting(
        "beside a wide lake",
        "the lake",
        _words("the jetty,the reeds,the boathouse,the willow tree,the small island", ","),
    ),
)
HOUSES = _words("a small cottage,a stone house,a little red house,a wooden house", ",")

GOOD_TRAITS = _words("kind brave clever gentle curious cheerful patient honest friendly")
ODD_TRAITS = _words("shy quiet careful playful stubborn proud restless dreamy little")
TRAITS = GOOD_TRAITS + ODD_TRAITS

TREASURES = _words(
    "silver key,red kite,wooden flute,blue scarf,brass compass,little bell,glass marble,green hat,"
    "gold ring,pocket watch,toy boat,picture book,silver whistle,woollen mitten,copper coin",
    ",",
)
MACHINES = _words("kite,cart,lantern,clock,toy boat,music box,fishing net,sled,water wheel", ",")
GIFTS = _words("wooden bird,warm scarf,painted bowl,small drum,straw hat,clay cup,soft quilt", ",")
CROPS = _words("pumpkin sunflower cabbage melon bean carrot turnip")
FRUITS = _words("apples pears plums cherries berries nuts figs")
TREATS = _words(
    "honey cake,plum pie,apple tart,warm bread,carrot soup,berry jam,oat biscuits,nut bread", ","
)
SKILLS = _words(
    "swim,whistle,skate,bake bread,play the flute,paint,sing,juggle,row a boat,read,dance", ","
)
COLOURS = _words("red blue green yellow white grey brown orange purple black pink")
SAD = _words("sad worried lonely upset unhappy")
GLAD = _words("happy glad proud cheerful delighted")
SEASONS = _words("spring summer autumn winter")
PARTS_OF_DAY = _words("morning afternoon evening")
MATERIALS = _words("wood stone glass clay wool paper iron")
CITIES = _words(
    "Paris London Rome Berlin Madrid Oslo Tokyo Cairo Lima Vienna Prague Dublin Athens Boston Delhi"
)

_ONSETS = _words("B D F G H J K L M N P R S T V Z Br Dr Fl Gr Kr Sh St Th Tr")
_VOWELS = _words("a e i o u a e i o ai ea oo")
_CODAS = _words("l n r s t m k v d b nd rt st lm sk")
_ENDINGS = _words("a o us in en y ia ar on el and ich eth ov er")


def invented(rng: random.Random) -> str:
    """Return a made-up name, so that a model learns to copy names that it has never seen."""
    parts = [rng.choice(_ONSETS), rng.choice(_VOWELS), rng.choice(_CODAS)]
    if rng.random() < 0.3:
        parts += [rng.choice(_VOWELS), rng.choice(_CODAS)]
    if rng.random() < 0.7:
        parts.append(rng.choice(_ENDINGS))
    return "".join(parts)


def some_name(rng: random.Random) -> str:
    """Return a first name, at times an invented one."""
    return invented(rng) if rng.random() < 0.4 else rng.choice(NAMES)


def some_city(rng: random.Random) -> str:
    """Return a city, at times an invented one."""
    return invented(rng) if rng.random() < 0.4 else rng.choice(CITIES)


SCENES = {
    "spring": (
        "the trees were [green with new leaves|full of pink blossom]",
        "a [soft|light] rain had fallen in the night",
        "the first flowers were [open|growing in the grass]",
    ),
    "summer": (
        "the sun was [warm|bright] and the sky was blue",
        "the air smelled of [grass|flowers|honey]",
        "bees [hummed|flew] [in the warm air|from flower to flower]",
    ),
    "autumn": (
        "the leaves were [red and gold|falling one by one]",
        "a cool wind [blew over the fields|shook the trees]",
        "a thin mist [lay over the grass|hid the road]",
    ),
    "winter": (
        "the ground was white with [snow|frost]",
        "the wind was cold and the [ponds were frozen|days were short]",
        "snow [fell slowly from a grey sky|lay on every roof]",
    ),
}
