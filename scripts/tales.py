"""Short English tales, told from a seed: the text that the demo model is trained on.

A tale has a hero and a companion, a thing that returns by name, a trouble and a consequence that follows from it.
Almost all of this file is the material. A *plot* is a row of beats, each written in several ways; a *matter* fills the
plot's slots with things that belong together (who has a bell meets a fog, who has a shovel meets the snow). Two marks
make a sentence out of a template: `[this|that]` is a choice, and `{hero.he}` is a slot, filled by `str.format`.

    tale(0)              the tale of seed 0
    tales(1000, 0)       a thousand tales, the same ones every time
    vocabulary()         every word that a tale can use

Hero and companion are always a she and a he, so a pronoun always says who is meant.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple


def with_article(words: str) -> str:
    """The words with "a" or "an" before them, by their first letter; no word here sounds unlike its spelling."""
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


@dataclass(frozen=True)
class Person:
    """Someone in a tale, with the forms in which a sentence may speak of them."""

    name: str
    he: str
    him: str
    his: str
    role: str = ""
    kin: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def He(self) -> str:
        return self.he.capitalize()

    @property
    def His(self) -> str:
        return self.his.capitalize()

    @property
    def a_role(self) -> str:
        return with_article(self.role)


@dataclass(frozen=True)
class Thing:
    """A thing or an animal: "a rusty bell" when it is first seen, "the bell" ever after."""

    look: str
    noun: str

    def __str__(self) -> str:
        return self.noun

    @property
    def a(self) -> str:
        return with_article(f"{self.look} {self.noun}")

    @property
    def one(self) -> str:
        return with_article(self.noun)

    @property
    def the(self) -> str:
        return f"the {self.noun}"

    @property
    def The(self) -> str:
        return f"The {self.noun}"


Matter = Mapping[str, str | Thing]
Beat = tuple[str, ...]


class Plot(NamedTuple):
    """How a kind of tale goes: the hero's nature, the beats of its two paragraphs, and what it may be about."""

    nature: str
    before: tuple[Beat, ...]
    after: tuple[Beat, ...]
    matters: Sequence[Matter]


# ----------------------------------------------------------------------------------------------------------- the people

WOMEN = "Mara Nell Anna Ida Rosa Lena"

MEN = "Tom Otto Hugo Ben Karl Emil"

HOMES = {
    "little girl": "at the end of the lane",
    "little boy": "at the end of the lane",
    "[old|young] sailor": "by the harbour",
    "[old|young] fisher": "near the beach",
    "[old|young] baker": "next to the bakery",
    "[old|young] shepherd": "on the green hill",
    "[old|young] miller": "beside the mill",
    "[old|young] weaver": "in a narrow lane",
    "[old|young] smith": "behind the forge",
    "[old|young] gardener": "behind the orchard",
    "[old|young] woodcutter": "at the edge of the forest",
    "[old|young] beekeeper": "by the meadow",
    "[old|young] carpenter": "near the church",
    "[old|young] potter": "by the old bridge",
    "[old|young] clockmaker": "on the market square",
}

OPENINGS: Beat = (
    "Once upon a time there was {hero.a_role} [named|called] {hero}, who lived {home}.",
    "Once upon a time, {home}, there lived {hero.a_role} [named|called] {hero}.",
    "Once upon a time {hero.a_role} lived {home}. {hero.His} name was {hero}.",
    "Once there was {hero.a_role} [named|called] {hero}. {hero.He} lived {home}.",
    "Long ago, {hero.a_role} [named|called] {hero} lived {home}.",
    "Long ago, [in a small village|in a quiet village|in a town by the sea], there lived {hero.a_role} called {hero}.",
    "The {hero.role} was [named|called] {hero}, and {hero.he} lived {home}.",
    "The {hero.role} lived {home}. {hero.His} name was {hero}.",
    "The {hero.role} {hero} lived [alone|quietly|in a small house] {home}.",
    "In a [small|little|crooked|white] house {home} lived {hero.a_role} [named|called] {hero}.",
    "There was once {hero.a_role} who lived {home}. {hero.His} name was {hero}.",
    "{hero} was {hero.a_role} who lived {home}.",
    "{hero} lived {home}.",
    "Everyone in the village knew {hero}, the {hero.role}.",
    "This is the tale of {hero}, {hero.a_role} who lived {home}.",
)

SHARED = {
    "companion": "{hero.his} {friend.kin} {friend}",
    "Companion": "{hero.His} {friend.kin} {friend}",
    "One_day": "[One morning|One day|One bright morning|Early one morning|One afternoon|One windy day|One Sunday]",
    "Later": "[Three days later|A week later|Not long after that|Before the week was over|Soon after]",
    "At_once": "[Then|All at once|Suddenly]",
}

# -------------------------------------------------------------------------- a thing nobody wants turns out to be wanted

FOUND = Plot(
    nature="{hero.He} [never threw anything away|kept every old thing that {hero.he} found|had a use for everything].",
    before=(
        (
            "{One_day}, {hero} found {thing.a} {found}.",
            "{hero} found {thing.a} {found}.",
            "{One_day}, {hero} saw something {found}. It was {thing.a}.",
            "It was [still early|a quiet day|almost evening] when {hero} found {thing.a} {found}.",
        ),
        (
            '"What good is an old {thing}?" asked {companion}. "[We shall see|Wait and see]," said {hero}, and '
            "{hero.he} {kept}.",
            '{Companion} laughed. "[Throw it away|Leave it there]," {friend.he} said. But {hero} {kept}.',
            '"It is only an old {thing}," said {companion}, but {hero} {kept}.',
            "{Companion} [could not see what it was good for|said that it was good for nothing]. {hero} [only|just] "
            "smiled, and {hero.he} {kept}.",
        ),
    ),
    after=(
        ("{Later}, {trouble}.", "Then, [one night|one evening|one grey day], {trouble}."),
        (
            "{hero} [remembered|thought of] {thing.the}.",
            "Nobody knew what to do. Then {hero} [remembered|thought of] {thing.the}.",
            '"The {thing}!" [cried|said] {hero}.',
            "{hero} did not wait. {hero.He} ran to get {thing.the}.",
        ),
        ("{use}. {saved}.",),
        (
            '"Now I know what an old {thing} is good for," said {friend}.',
            '"I will never laugh at an old {thing} again," said {friend}, and {friend.he} never did.',
            '"Thank you," said {friend}. "Thank {thing.the}," said {hero}, and they both laughed.',
            "{hero} kept {thing.the} for the rest of {hero.his} life.",
            "From that day on, nobody in the village threw away an old {thing}.",
        ),
    ),
    matters=(
        dict(
            thing=Thing("[brass|silver|rusty]", "bell"),
            found="[in the sand|on the beach]",
            kept="hung it by the door",
            trouble="a thick fog came in from the sea while {friend} was out in the boat",
            use="{hero.He} stood on the [beach|rocks] and rang the bell [again and again|as loudly as {hero.he} could]",
            saved="{friend} heard it through the fog, turned the boat towards the sound and came safely home",
        ),
        dict(
            thing=Thing("[long|strong|thick]", "rope"),
            found="[behind the barn|by the side of the road]",
            kept="hung it on a nail",
            trouble="{friend} slipped and fell into the well",
            use="{hero.He} tied the rope to a tree and let the other end down",
            saved="{friend} held on tight and climbed out of the well, wet but safe",
        ),
        dict(
            thing=Thing("[dusty|small|brass]", "lantern"),
            found="[in the attic|in the cellar]",
            kept="filled it with oil",
            trouble="{friend} went into the forest and did not come back before dark",
            use="{hero.He} lit the lantern and held it high at the edge of the forest",
            saved="{friend} saw the light between the trees and walked towards it until {friend.he} was safe",
        ),
        dict(
            thing=Thing("[silver|wooden|little]", "whistle"),
            found="[in the grass|under the apple tree]",
            kept="put it in {hero.his} pocket",
            trouble="thunder frightened {friend}'s sheep, and they ran away over the hills",
            use="{hero.He} climbed the highest hill and blew the whistle [again and again|as loudly as {hero.he} "
            "could]",
            saved="One by one the sheep came back, and {friend} counted them until not one was missing",
        ),
        dict(
            thing=Thing("[rusty|heavy|iron]", "key"),
            found="[under a stone|in the garden]",
            kept="put it in {hero.his} pocket",
            trouble="the wind shut the door of the tower while {friend} was inside, and nobody could open it",
            use="{hero.He} put the key into the lock and turned it",
            saved="The door opened, and {friend} came out of the tower into the sun",
        ),
        dict(
            thing=Thing("[long|broken|wooden]", "ladder"),
            found="[behind the mill|behind the barn]",
            kept="mended it",
            trouble="{friend} climbed a tall tree and was too frightened to come down",
            use="{hero.He} set the ladder against the tree and held it with both hands",
            saved="{friend} came down step by step, and soon {friend.he} stood in the grass again",
        ),
        dict(
            thing=Thing("[thick|grey|heavy]", "blanket"),
            found="[in the attic|in the cellar]",
            kept="washed it and folded it",
            trouble="{friend} fell through the ice on the pond and came out cold and wet",
            use="{hero.He} put the blanket around {friend} and sat with {friend.him} by the fire",
            saved="Soon {friend} was warm again and asked for a bowl of soup",
        ),
        dict(
            thing=Thing("[heavy|rusty|iron]", "hammer"),
            found="[in the mud|by the side of the road]",
            kept="cleaned it with oil",
            trouble="a storm tore three boards from {friend}'s roof, and the rain came in",
            use="{hero.He} climbed up in the storm and nailed the boards back with the hammer",
            saved="No more rain came in, and {friend} slept that night in a dry bed",
        ),
        dict(
            thing=Thing("[big|broken|wooden]", "bucket"),
            found="[by the side of the road|behind the barn]",
            kept="mended it",
            trouble="a spark flew from the chimney and set {friend}'s barn on fire",
            use="{hero.He} filled the bucket at the well and ran to the barn, again and again",
            saved="At last the fire went out, and {friend}'s barn was saved",
        ),
        dict(
            thing=Thing("[torn|dusty|yellow]", "map"),
            found="[in the attic|in a box]",
            kept="put it in {hero.his} pocket",
            trouble="{hero} and {friend} lost their way in the hills, and the sun was going down",
            use="{hero.He} opened the map and found a little path beside a stream",
            saved="They followed the path, and before dark they saw the lights of the village",
        ),
        dict(
            thing=Thing("[long|torn|grey]", "net"),
            found="[on the beach|in the sand]",
            kept="mended it",
            trouble="{friend}'s little dog fell into the river, and the water carried it away",
            use="{hero.He} ran to the bridge and threw the net into the river",
            saved="The dog swam into the net, and soon {friend} held it in {friend.his} arms, wet but safe",
        ),
        dict(
            thing=Thing("[long|thick|silver]", "needle"),
            found="[on the floor|in a box]",
            kept="stuck it in {hero.his} coat",
            trouble="{hero} and {friend} were far out at sea when the wind tore the sail",
            use="{hero.He} took the needle and some thread and sewed the sail from top to bottom",
            saved="The sail filled with wind again and carried the boat safely home",
        ),
        dict(
            thing=Thing("[big|dusty|red]", "drum"),
            found="[in the attic|in the barn]",
            kept="hung it on a nail",
            trouble="wolves came down from the hills to {friend}'s sheep",
            use="{hero.He} ran out and beat the drum [again and again|as loudly as {hero.he} could]",
            saved="The wolves were frightened by the sound and ran away, and {friend} did not lose one sheep",
        ),
        dict(
            thing=Thing("[big|rusty|heavy]", "shovel"),
            found="[in the barn|in the mud]",
            kept="cleaned it with oil",
            trouble="so much snow fell in the night that {friend} could not open the door",
            use="{hero.He} took the shovel and dug a path through the snow",
            saved="At noon the door opened, and {friend} came out with a pot of hot soup",
        ),
        dict(
            thing=Thing("[long|thick|heavy]", "board"),
            found="[behind the mill|on the beach]",
            kept="leaned it against the wall",
            trouble="the river carried away the bridge, and {friend} was left on the other side",
            use="{hero.He} carried the board to the river and laid it from one side to the other",
            saved="{friend} walked across with small steps and did not even get wet",
        ),
        dict(
            thing=Thing("[small|broken|silver]", "mirror"),
            found="[in a box|in the grass]",
            kept="put it in {hero.his} pocket",
            trouble="the boat of {hero} and {friend} broke on the rocks of a lonely island",
            use="{hero.He} held the mirror up to the sun until it shone like a star",
            saved="A ship saw the light, turned towards the island and took them both home",
        ),
    ),
)

# ------------------------------------------------------------------------------------ a helped animal helps in its turn

KINDNESS = Plot(
    nature="{hero.He} was [kind|good] to every animal.",
    before=(
        (
            "{One_day}, {hero} [found|saw] {animal.a} {plight}.",
            "{hero} was on the way home when {hero.he} [found|saw] {animal.a} {plight}.",
            "{One_day}, {hero} heard a small sound. It was {animal.a} {plight}.",
            "{hero} found {animal.a} {plight}.",
        ),
        (
            '"[Leave it|Come away]," said {companion}. "It is only {animal.one}." But {hero} {help}.',
            "{Companion} wanted to walk on, but {hero} stayed and {help}.",
            '"[Poor thing|Do not be afraid]," {hero} said to {animal.the}. {hero.He} {help}. {Companion} [only|just] '
            "shook {friend.his} head.",
        ),
        ("{leaves}.",),
    ),
    after=(
        ("{Later}, {need}.", "[In the winter|In the autumn|That year], {need}."),
        (
            "{At_once} {returns}.",
            "There was nobody who could help. {At_once} {returns}.",
            '"[What shall we do|What now]?" asked {friend}. {At_once} {returns}.',
        ),
        (
            '"It was only {animal.one}," said {friend}, "but it remembered you."',
            '"Thank you," {hero} said to {animal.the}, and {hero.he} gave it {treat}.',
            "From that day on, {hero} left {treat} by the door every [night|evening], and {animal.the} came for it.",
            '"You were right to help it," said {friend}, and {friend.he} gave {animal.the} {treat}.',
            "After that, {friend} never again walked past an animal that needed help.",
        ),
    ),
    matters=(
        dict(
            animal=Thing("[red|young|thin]", "fox"),
            plight="caught in a trap",
            help="opened the trap with both hands",
            leaves="The fox looked back once and ran away between the trees",
            need="{hero} and {friend} lost their way in the deep snow",
            returns="the fox came out of the trees and led them safely home",
            treat="a piece of cheese",
        ),
        dict(
            animal=Thing("[black|young|small]", "crow"),
            plight="with a broken wing",
            help="fed it until the wing was well",
            leaves="When it could fly again, the crow flew away over the roofs",
            need="{friend} lost a gold ring in the long grass and could not find it",
            returns="the crow flew down with the ring in its beak",
            treat="a piece of bread",
        ),
        dict(
            animal=Thing("[young|grey|small]", "seal"),
            plight="caught in a net",
            help="cut the net with a knife",
            leaves="The seal looked back once and swam away",
            need="{hero} and {friend} were far out at sea when their boat lost its sail in a storm",
            returns="the seal came up beside the boat and pushed it back to the beach",
            treat="a fresh fish",
        ),
        dict(
            animal=Thing("[tired|tiny|brown]", "mouse"),
            plight="in a bucket of water",
            help="lifted it out and dried it with {hero.his} scarf",
            leaves="The mouse shook its ears and ran into a hole",
            need="thieves came to the house and tied {hero} and {friend} to two chairs",
            returns="the mouse ran out of its hole and bit through the ropes",
            treat="a piece of cheese",
        ),
        dict(
            animal=Thing("[thin|hungry|brown]", "dog"),
            plight="in the rain by the side of the road",
            help="gave it half of {hero.his} bread",
            leaves="The dog ate the bread and ran away",
            need="{hero} and {friend} fell asleep by the fire, and a spark flew onto the floor",
            returns="the dog came to the door and barked until they woke, and they put the fire out in time",
            treat="a big bone",
        ),
        dict(
            animal=Thing("[white|grey|young]", "goose"),
            plight="frozen to the ice on the pond",
            help="poured warm water around its feet",
            leaves="The goose shook its wings and flew away",
            need="a thief climbed through {friend}'s window",
            returns="the goose flew out of the dark and beat the thief with its wings until he ran away",
            treat="a bowl of corn",
        ),
        dict(
            animal=Thing("[little|tired|tiny]", "bee"),
            plight="in the web of a spider",
            help="broke the web with one finger",
            leaves="The bee flew three times around {hero.his} head and away over the meadow",
            need="there was nothing left to eat in the house of {hero} and {friend}",
            returns="the bee came to the window and led them to a tree full of honey",
            treat="a bowl of flowers",
        ),
        dict(
            animal=Thing("[grey|old|tired]", "donkey"),
            plight="with a stone in its foot",
            help="took out the stone with careful fingers",
            leaves="The donkey shook its ears and walked away down the road",
            need="the river rose so high that {hero} and {friend} had to climb onto the roof",
            returns="the donkey came through the water and carried them both to dry land",
            treat="a sweet apple",
        ),
        dict(
            animal=Thing("[young|small|white]", "owl"),
            plight="in the grass under its nest",
            help="climbed the tree and put it back",
            leaves="The owl looked at {hero.him} with big yellow eyes",
            need="{hero} and {friend} stayed too long in the forest, and it grew dark",
            returns="the owl called from the trees, and they followed its voice back to the road",
            treat="a piece of meat",
        ),
        dict(
            animal=Thing("[black|brown|young]", "horse"),
            plight="with all four feet deep in the mud",
            help="pulled it out with a rope",
            leaves="The horse shook off the mud and ran away over the meadow",
            need="{friend} fell ill, and the doctor lived far away",
            returns="the horse stood at the gate, and it carried {hero} to the doctor and back before dark",
            treat="a sweet apple",
        ),
        dict(
            animal=Thing("[young|brown|thin]", "deer"),
            plight="with one foot between two stones",
            help="moved the stones away",
            leaves="The deer looked back once and ran away between the trees",
            need="it did not rain for weeks, and the well of {hero} and {friend} was dry",
            returns="the deer came to the gate and led them up the hill to a stream of clear water",
            treat="a sweet apple",
        ),
        dict(
            animal=Thing("[wet|grey|hungry]", "cat"),
            plight="in the rain by the side of the road",
            help="dried it with {hero.his} scarf and gave it milk",
            leaves="The cat drank the milk and ran away",
            need="hungry mice came into the barn and ate {friend}'s corn",
            returns="the cat walked into the barn, and after three nights there was not one mouse left",
            treat="a bowl of milk",
        ),
    ),
)

# --------------------------------------------------------------------------------- a forgotten promise, made good again

FORGOTTEN = Plot(
    nature="{hero.He} was [kind|cheerful|quick], but {hero.he} [often forgot things|had a head full of dreams].",
    before=(
        (
            '"Listen, {hero}," said {companion} [one morning|one day]. "{warning}." "[I will|I promise]," said {hero}.',
            '{hero} was [on the way out|still in bed] when {companion} said, "{warning}. Do not forget!" "[I will not '
            'forget|I promise]," said {hero}.',
            '"{warning}, {hero}," said {companion}, who had to go to town. "[Of course|I promise]," said {hero}.',
            '{One_day}, {hero} made a promise to {companion}. "{warning}," said {friend}, and {hero} said, "[I will|Of '
            'course]."',
        ),
        (
            "But [the sun was shining|there was music in the street|{hero.he} met an old friend|{hero.he} began to "
            "sing], and {hero.he} forgot [it|all about it|{duty}].",
            "But {hero} [lay down in the grass|sat down in the sun] and fell asleep.",
        ),
        ("{mishap}.",),
    ),
    after=(
        (
            '"[Oh no|Oh dear]!" cried {hero}. "I forgot {duty}!"',
            'When {hero} saw it, {hero.he} wanted to hide. "It was my fault," {hero.he} said [at last|to {friend}].',
            "{friend} was [not angry|not even angry], only [sad|quiet], and that was worse.",
        ),
        ("{mend}.",),
        (
            '"[A promise is a promise|I have learned it now]," said {hero}.',
            '"[Now it is good again|Everyone forgets something once]," said {friend}, and {friend.he} '
            "[smiled|laughed].",
            "{friend} saw how tired {hero} was and made {hero.him} a cup of tea.",
        ),
        ("[From then on|From that day on|After that], {hero} {habit}.",),
    ),
    matters=(
        dict(
            warning="Shut the gate when you come in",
            duty="the gate",
            mishap="The goat walked in through the open gate and ate every cabbage in {friend}'s garden",
            mend="{hero} caught the goat, dug the garden and planted new cabbages until it was dark",
            habit="shut every gate twice",
        ),
        dict(
            warning="Look after the bread in the oven",
            duty="the bread",
            mishap="Soon the kitchen was full of smoke, and the bread was as black as coal",
            mend="{hero} cleaned the oven and baked new bread until it was dark",
            habit="never left an oven alone",
        ),
        dict(
            warning="Tie up the boat when you come home",
            duty="the boat",
            mishap="The water rose, lifted the boat and carried it out to sea",
            mend="{hero} swam after the boat and rowed it home, cold and wet",
            habit="tied up every boat with two ropes",
        ),
        dict(
            warning="Put the lid on the honey",
            duty="the honey",
            mishap="A thousand ants came in through the window and walked into the honey",
            mend="{hero} washed the kitchen and worked all week to buy a new jar of honey",
            habit="put the lid on every jar",
        ),
        dict(
            warning="Shut the window if it rains",
            duty="the window",
            mishap="The rain came in through the open window and fell on {friend}'s books",
            mend="{hero} carried the books to the fire and dried every page",
            habit="looked at the sky every morning",
        ),
        dict(
            warning="Fill the lamp with oil",
            duty="the lamp",
            mishap="In the night the lamp went out, and {friend} fell on the dark stairs",
            mend="{hero} filled the lamp and carried water and wood for {friend} until {friend.he} could walk again",
            habit="filled the lamp every evening",
        ),
        dict(
            warning="Bring in the shirts if the wind rises",
            duty="the shirts",
            mishap="The wind took {friend}'s shirts and threw them into the mud",
            mend="{hero} found every shirt, washed it and hung it by the fire",
            habit="looked at the sky every morning",
        ),
        dict(
            warning="Lock up the hens before dark",
            duty="the hens",
            mishap="In the night a fox came, and the frightened hens flew up into the trees",
            mend="{hero} climbed every tree and carried the hens home, one by one",
            habit="counted the hens every evening and locked the door",
        ),
        dict(
            warning="Mend the roof before it rains",
            duty="the roof",
            mishap="The rain came through the roof and fell on {friend}'s bed",
            mend="{hero} gave {friend} a dry bed, climbed up in the rain and mended the roof",
            habit="mended every hole at once",
        ),
        dict(
            warning="Mend the net before we sail",
            duty="the net",
            mishap="That night they sailed out, but every fish swam away through the hole in the net",
            mend="{hero} sat by the lamp all night and mended the net, and in the morning it was full of fish",
            habit="mended every hole at once",
        ),
        dict(
            warning="Put the lid on the well",
            duty="the well",
            mishap="The wind took {friend}'s best hat and threw it into the open well",
            mend="{hero} climbed down on a rope, found the hat and dried it by the fire",
            habit="put the lid on the well every evening",
        ),
        dict(
            warning="Feed the donkey at noon",
            duty="the donkey",
            mishap="The hungry donkey walked into the kitchen and ate {friend}'s birthday cake",
            mend="{hero} fed the donkey, went to the kitchen and baked a new cake until it was dark",
            habit="fed the donkey before {hero.he} ate",
        ),
    ),
)

# ------------------------------------------------------------------------ a treasure is lost where the hero last had it

TREASURES = (
    Thing("[gold|silver|thin]", "ring"),
    Thing("[gold|silver|lucky]", "coin"),
    Thing("[blue|silver|brass]", "button"),
    Thing("[little|silver|brass]", "key"),
)

LOSSES = (
    dict(
        doing="making bread",
        find="They cut the bread, one piece after the other, and in the last piece was {thing.the}",
    ),
    dict(
        doing="cleaning fish",
        find="They cut open the biggest fish, and inside it was {thing.the}",
    ),
    dict(
        doing="washing by the open window",
        find="They looked up into the tall tree by the window, and in the nest of a crow was {thing.the}",
    ),
    dict(
        doing="planting cabbages in the garden",
        find="They dug in the garden until it was dark, and under the last cabbage was {thing.the}",
    ),
    dict(
        doing="getting water from the well",
        find="They let the bucket down and pulled it up again, and in the bucket was {thing.the}",
    ),
    dict(
        doing="feeding the goat",
        find="They looked at the goat, which was chewing slowly, and between its teeth was {thing.the}",
    ),
    dict(
        doing="making a snowman",
        find="They waited until the sun came out and the snowman was gone, and in the wet grass was {thing.the}",
    ),
    dict(
        doing="mending my coat",
        find="They took the coat and felt in every pocket, and in a hole at the bottom was {thing.the}",
    ),
)

LOST = Plot(
    nature="{hero.He} was poor, but {hero.he} had one treasure.",
    before=(
        (
            "{hero} had {thing.a} that {hero.his} [mother|father|grandmother] had given {hero.him}.",
            "{hero} had {thing.a}, and {hero.he} loved it more than anything.",
            "Nothing was dearer to {hero} than {thing.a} from {hero.his} [mother|father|grandmother].",
        ),
        (
            "[One evening|One day|One Sunday], {thing.the} was gone.",
            "But [one evening|one day|one Sunday] {hero.he} could not find {thing.the}.",
        ),
        (
            "{hero} looked [under the bed|behind the door], [in the cellar|in the attic] and [in every box|in every "
            "pocket], but it was not there.",
            "{hero.He} looked [under the bed|behind the door], and {hero.he} looked [in the barn|in the garden], but "
            "there was no {thing}.",
        ),
    ),
    after=(
        (
            '{Companion} [came to help|saw {hero.his} sad face]. "[What were you doing when you lost it|What were you '
            'doing this morning]?" {friend.he} asked.',
            '"What were you doing when you last had it?" asked {companion}.',
        ),
        (
            '"I was {doing}," said {hero}.',
            '{hero} thought for a long time. "I was {doing}," {hero.he} said [at last|slowly].',
        ),
        (
            '"Then [come with me|I know where it is]," said {friend}.',
            '"Then we must look there," said {friend}.',
        ),
        ("{find}.",),
        (
            "{hero} [laughed and cried|laughed until {hero.he} cried], and {hero.he} never lost {thing.the} again.",
            '"What would I do without you?" said {hero}. "You are the best {friend.kin} in the world."',
            '"[You found it|Thank you]!" cried {hero}, and {hero.he} made a [cake|pot of soup] for {friend}.',
            "That night {hero} slept with {thing.the} in {hero.his} hand.",
        ),
    ),
    matters=tuple(dict(thing=thing, **loss) for thing, loss in product(TREASURES, LOSSES)),
)

# ------------------------------------------------------------------------------------ a wish, paid for in two exchanges

WISHES = (
    dict(
        wish=Thing("[red|warm|blue]", "coat"),
        maker="tailor",
        joy="{hero} wore the coat all winter and was never cold",
    ),
    dict(
        wish=Thing("[red|blue|big]", "kite"),
        maker="toymaker",
        joy="{hero} and {friend} flew the kite on the hill until the stars came out",
    ),
    dict(
        wish=Thing("[red|long|strong]", "sled"),
        maker="carpenter",
        joy="{hero} and {friend} rode the sled down the hill until it was dark",
    ),
    dict(
        wish=Thing("[blue|big|white]", "jug"),
        maker="potter",
        joy="{hero} put flowers in the jug and set it in the window for everyone to see",
    ),
    dict(
        wish=Thing("[iron|big|black]", "pot"),
        maker="smith",
        joy="That evening {hero} and {friend} ate hot soup from the pot",
    ),
    dict(
        wish=Thing("[thick|warm|blue]", "blanket"),
        maker="weaver",
        joy="That night {hero} slept under the blanket and was not cold",
    ),
    dict(
        wish=Thing("[brass|little|silver]", "clock"),
        maker="clockmaker",
        joy="{hero} hung the clock on the wall and was never late again",
    ),
    dict(
        wish=Thing("[brown|fine|little]", "fiddle"),
        maker="fiddler",
        joy="{hero} played the fiddle at the window until the whole street began to dance",
    ),
)

PRICES = (
    dict(price=Thing("[fresh|warm|big]", "loaf"), seller="baker"),
    dict(price=Thing("[full|big|little]", "jar of honey"), seller="beekeeper"),
    dict(price=Thing("[full|heavy|big]", "sack of flour"), seller="miller"),
    dict(price=Thing("[big|fresh|silver]", "fish"), seller="fisher"),
    dict(price=Thing("[full|big|heavy]", "bag of wool"), seller="shepherd"),
    dict(price=Thing("[round|big|yellow]", "cheese"), seller="farmer"),
)

TRADE = Plot(
    nature="{hero.He} [had no money|was poor], but {hero.he} [was clever|knew how to ask].",
    before=(
        (
            "{One_day}, {hero} saw {wish.a} in the window of the {maker} and could not forget it.",
            "{hero} wanted {wish.a} more than anything.",
            "{One_day}, {hero} wished for {wish.a}.",
        ),
        (
            '{hero.He} went to the {maker}. "You may have {wish.the}," said the {maker}, "if you bring me {price.a}."',
            '{hero.He} had no money, so {hero.he} went to the {maker}. "Bring me {price.a}," said the {maker}, "and '
            '{wish.the} is yours."',
        ),
        (
            'So {hero} went to the {seller}. "You may have {price.a}," said the {seller}, "if you bring me a basket of '
            '{picked}."',
            'The {seller} had {price.a}. "What will you give me for it?" asked the {seller}. "I would like a basket of '
            '{picked}."',
        ),
    ),
    after=(
        (
            "{hero} took a basket and went into the forest with {companion}, and they picked {picked} until it was "
            "full.",
            '"I know where to find {picked}," said {companion}. They went into the forest and picked {picked} until '
            "the basket was full.",
        ),
        (
            "{hero} gave the basket to the {seller} and got {price.the}, and then {hero.he} gave {price.the} to the "
            "{maker} and got {wish.the}.",
            "For the basket {hero} got {price.the} from the {seller}, and for {price.the} {hero.he} got {wish.the} "
            "from the {maker}.",
        ),
        ("{joy}.",),
        (
            '"A basket of {picked} for {wish.one}!" said {friend}[, and they both laughed|].',
            '"[Next time|Tomorrow] we will pick {picked} for me," said {friend}.',
            "And everyone had what they wanted.",
            '"I could not have done it without you," {hero} said to {friend}.',
        ),
    ),
    matters=tuple(dict(picked="[nuts|berries|mushrooms]", **wish, **price) for wish, price in product(WISHES, PRICES)),
)

# -------------------------------------------------------------------------- a stranger at the door leaves a gift behind

STRANGER = Plot(
    nature="{hero.He} was poor, but {hero.his} door was never locked.",
    before=(
        (
            "One [cold|rainy|dark|snowy] night, {stranger} knocked at {hero}'s door.",
            "One [cold|rainy|dark|snowy] night, there was a knock at {hero}'s door. Outside stood {stranger}.",
            "{hero} was eating supper when {stranger} knocked at the door.",
        ),
        (
            '"[May I come in|May I sit by your fire]?" asked the stranger. "I am [cold|tired] and hungry."',
            '"I have walked [all day|a long way]," said the stranger, "and nobody has opened a door."',
        ),
        (
            '"Do not open it," said {companion}. "We have so little." But {hero} gave the stranger [a bowl of '
            "soup|half of {hero.his} bread] and a warm bed.",
            "{hero} had only one [bowl of soup|piece of bread] left, but {hero.he} gave it to the stranger. "
            "{Companion} shook {friend.his} head.",
        ),
    ),
    after=(
        (
            "In the morning the stranger was gone. On the table was {gift.a}.",
            "When {hero} woke, the stranger was gone, and on the chair by the fire was {gift.a}.",
        ),
        ("{fortune}.",),
        (
            '"And I told you not to open the door!" said {friend}.',
            '"Next time I will open the door myself," said {friend}, and {friend.he} did.',
            "{hero} and {friend} never saw the stranger again, but they often spoke of that night.",
            "After that, {friend}'s door was never locked again.",
        ),
    ),
    matters=tuple(
        dict(
            stranger="[an old woman in a grey coat|an old man with a white beard|a tired traveller with a heavy bag]",
            **gift,
        )
        for gift in (
            dict(
                gift=Thing("[small|brown|round]", "seed"),
                fortune="{hero} planted the seed, and by summer there was a tree with so many apples that the whole "
                "village could eat",
            ),
            dict(
                gift=Thing("[gold|silver|lucky]", "coin"),
                fortune="{hero} bought bread with the coin, but the next morning it was back on the table, and so it "
                "was every morning",
            ),
            dict(
                gift=Thing("[long|wooden|silver]", "spoon"),
                fortune="{hero} stirred the soup with the spoon, and it was so good that people came from far away to "
                "eat it",
            ),
            dict(
                gift=Thing("[white|long|yellow]", "candle"),
                fortune="{hero} lit the candle, and it burned all winter and never grew shorter",
            ),
            dict(
                gift=Thing("[brass|wooden|blue]", "button"),
                fortune="{hero} sewed the button to {hero.his} coat, and from then on the coat was warm in every storm",
            ),
            dict(
                gift=Thing("[white|blue|little]", "jug"),
                fortune="{hero} poured milk for {friend} and for every neighbour in the street, and the jug was never "
                "empty",
            ),
            dict(
                gift=Thing("[thin|silver|little]", "needle"),
                fortune="{hero} sewed a torn sail with the needle, and it never tore again, and soon every sailor came "
                "to {hero.him}",
            ),
            dict(
                gift=Thing("[black|wooden|little]", "flute"),
                fortune="When {hero} played the flute, everyone who was ill slept well and got up in the morning",
            ),
        )
    ),
)

# ------------------------------------------------------------------------------ two want it, it breaks, two can mend it

QUARREL = Plot(
    nature="{hero.He} did not like to share.",
    before=(
        (
            "{One_day}, {hero} and {companion} found {thing.a} {found}.",
            "{hero} and {companion} had {thing.a}.",
            "{One_day}, the [neighbour|old carpenter] gave {thing.a} to {hero} and {companion}.",
        ),
        (
            '"It is mine," said {hero}. "No, it is mine," said {friend}.',
            '"I want it first," said {friend}. "No, I want it first," said {hero}.',
            "{hero} wanted it all day long, and so did {friend}.",
        ),
        (
            "{hero} pulled on one side and {friend} pulled on the other, until {broke}.",
            "They pulled and pushed and shouted, until {broke}.",
        ),
    ),
    after=(
        (
            "For [two days|three days|a week] they did not speak. {hero} [sat alone by the window|did not want to "
            "eat].",
            "{friend} went home without a word, and {hero} sat alone [by the window|on the stairs].",
        ),
        (
            'Then {hero} came to {friend}. "[I am sorry|It was my fault]," {hero.he} said. "I am sorry too," said '
            "{friend}.",
            'At last {friend} came to {hero}. "It was my fault," {friend.he} said. "No, it was mine," said {hero}.',
        ),
        ("Together they {mended}.",),
        ("{shared}.",),
        (
            '"It is better with two," said {friend}.',
            "After that they shared everything.",
            '"Do you want it tomorrow?" asked {hero}. "Only if you come too," said {friend}.',
            "They never fought about {thing.the} again.",
        ),
    ),
    matters=(
        dict(
            thing=Thing("[red|blue|big]", "kite"),
            found="[on the beach|in the attic]",
            broke="the kite tore in two",
            mended="sewed the kite with strong thread",
            shared="{hero} held the string and {friend} ran, and the kite flew higher than the church tower",
        ),
        dict(
            thing=Thing("[red|old|long]", "sled"),
            found="[in the barn|in the attic]",
            broke="the sled lost a board",
            mended="nailed a new board to the sled",
            shared="They sat on the sled together, and with two it flew down the hill twice as fast",
        ),
        dict(
            thing=Thing("[little|old|blue]", "boat"),
            found="[on the beach|by the river]",
            broke="the boat fell on its side and filled with water",
            mended="pulled the boat out and dried it in the sun",
            shared="{hero} rowed and {friend} held the map, and they came to an island where nobody had been before",
        ),
        dict(
            thing=Thing("[big|sweet|round]", "cake"),
            found="[on the table|in the kitchen]",
            broke="the cake fell in the mud",
            mended="baked a new cake with honey and nuts",
            shared="They cut the cake in two, and each gave the bigger piece to the other",
        ),
        dict(
            thing=Thing("[brown|old|fine]", "fiddle"),
            found="[in the attic|in a box]",
            broke="every string of the fiddle broke",
            mended="put new strings on the fiddle",
            shared="{hero} played the fiddle and {friend} sang, and the whole street came to the window",
        ),
        dict(
            thing=Thing("[strong|little|wooden]", "cart"),
            found="[in the barn|behind the mill]",
            broke="the cart lost a wheel",
            mended="put the wheel back on the cart",
            shared="{hero} pulled the cart and {friend} pushed it, and so they brought their apples to town",
        ),
        dict(
            thing=Thing("[big|black|red]", "umbrella"),
            found="[in the attic|behind the door]",
            broke="the umbrella tore in two",
            mended="sewed the umbrella with strong thread",
            shared="They walked under the umbrella arm in arm, and both of them stayed dry in the rain",
        ),
        dict(
            thing=Thing("[thick|old|heavy]", "book"),
            found="[in the attic|in a box]",
            broke="the book lost every page",
            mended="sewed the pages back into the book",
            shared="{hero} read from the book and {friend} turned the pages, and they forgot to eat supper",
        ),
    ),
)

# ------------------------------------------------------------------------------------- a present made for want of money

PRESENT = Plot(
    nature="{hero.He} had no money, but {hero.he} had [clever|careful] hands.",
    before=(
        (
            "{hero} had no present, and the next day was the birthday of {companion}.",
            "{hero} wanted to give a present to {companion}.",
            "{hero} was sad. It was almost the birthday of {companion}, and there was nothing to give {friend.him}.",
        ),
        (
            "In town [everything|every present] cost too much, and {hero.his} [pocket was|pockets were] empty.",
            "{hero.He} looked in every window in town, but {hero.he} had no money.",
            "{hero.He} counted {hero.his} money. There was only one coin.",
        ),
        (
            "So {hero} took {stuff} and made {thing.a}.",
            '"Then I will make something," thought {hero}. {hero.He} took {stuff} and made {thing.a}.',
        ),
    ),
    after=(
        (
            "It took all night, and in the morning {hero.his} fingers were [sore|tired].",
            "{hero} worked by [the lamp|a candle] until the sun came up.",
            '"It is only {thing.one}," {hero} thought. "What if {friend} laughs?"',
        ),
        (
            "But {friend} did not laugh. {friend.He} {joy}.",
            "{friend} opened the box and was quiet for a long time. Then {friend.he} {joy}.",
            "When {friend} saw {thing.the}, {friend.he} smiled. {friend.He} {joy}.",
        ),
        (
            '"Did you make it yourself?" asked {friend}. "Then it is the best present of all."',
            '"[I will keep it|I will never give it away]," said {friend}, and {hero} was [happy|proud].',
            '"Nobody else has {thing.one} like this," said {friend}.',
            "That was the best birthday {friend} ever had.",
        ),
    ),
    matters=(
        dict(
            thing=Thing("[small|wooden|little]", "bird"),
            stuff="a knife and a piece of apple wood",
            joy="hung the bird over the bed, where it moved in the wind as if it could fly",
        ),
        dict(
            thing=Thing("[long|warm|thick]", "scarf"),
            stuff="red wool and two needles",
            joy="put on the scarf and wore it all day, even in the house",
        ),
        dict(
            thing=Thing("[big|round|sweet]", "cake"),
            stuff="flour, nuts and honey",
            joy="cut the cake at once and gave {hero} the first piece",
        ),
        dict(
            thing=Thing("[little|round|yellow]", "lantern"),
            stuff="paper and thin wood",
            joy="lit the lantern at once, and the walls were full of stars",
        ),
        dict(
            thing=Thing("[little|thin|wooden]", "flute"),
            stuff="a knife and a piece of apple wood",
            joy="played the flute until even the birds were quiet",
        ),
        dict(
            thing=Thing("[tiny|little|wooden]", "boat"),
            stuff="an old board and a piece of sail",
            joy="set the boat on the pond, and it sailed to the other side",
        ),
        dict(
            thing=Thing("[big|round|strong]", "basket"),
            stuff="long grass from the river",
            joy="filled the basket with apples and gave half of them to {hero}",
        ),
        dict(
            thing=Thing("[low|strong|wooden]", "chair"),
            stuff="four old boards and a hammer",
            joy="sat down in the chair by the fire and did not want to get up again",
        ),
        dict(
            thing=Thing("[blue|red|big]", "kite"),
            stuff="paper, thin wood and string",
            joy="ran up the hill, and the kite flew higher than the church tower",
        ),
    ),
)

# --------------------------------------------------------------------------------------------- a race, lost by hurrying

RACE = Plot(
    nature="{hero.He} was never in a hurry.",
    before=(
        (
            "{One_day}, {hero} and {companion} ran a race to {goal}.",
            '"Let us run a race to {goal}, {hero}," said {companion}[ one morning| one day|]. "[Good|Very well]," said '
            "{hero}.",
            '"I can run to {goal} faster than you, {hero}," said {companion}. "[We shall see|Wait and see]," said '
            "{hero}.",
        ),
        (
            "{friend} [laughed and was|was soon] far ahead. {hero} stayed on the road, not too fast and not too slow.",
            '"I will be there before you!" cried {friend}. {hero} said nothing and walked on.',
        ),
    ),
    after=(
        (
            "But the road was long, and {friend} {shortcut}. There {friend.he} {stuck}.",
            "To be even faster, {friend} {shortcut}. There {friend.he} {stuck}.",
        ),
        (
            '"Help!" cried {friend}. {hero} heard {friend.him} and turned back. {hero.He} {freed}.',
            "{hero} could have walked on and won. But {hero.he} turned back and {freed}.",
        ),
        (
            "They walked to {goal} together, [slowly|arm in arm|side by side].",
            "In the evening they came to {goal} side by side.",
        ),
        (
            '"You could have won," said {friend}. "I have won," said {hero}, and they both laughed.',
            '"Next time I will stay on the road," said {friend}.',
            '"Who was first?" everyone asked. "{hero}," said {friend}. "{friend}," said {hero}.',
        ),
    ),
    matters=tuple(
        dict(goal="[the old tower|the old mill|the old bridge|the big tree on the hill|the harbour]", **haste)
        for haste in (
            dict(
                shortcut="ran across the wet meadow",
                stuck="got stuck in the mud up to {friend.his} knees",
                freed="pulled {friend.him} out with a rope",
            ),
            dict(
                shortcut="climbed over a high wall",
                stuck="hung from a nail by {friend.his} coat",
                freed="lifted {friend.him} down",
            ),
            dict(
                shortcut="jumped into the river",
                stuck="held on to a rock in the cold water",
                freed="pulled {friend.him} out with a rope and dried {friend.him} with {hero.his} coat",
            ),
            dict(
                shortcut="went through the dark forest",
                stuck="lost {friend.his} way between the trees",
                freed="called until {friend} followed {hero.his} voice back to the road",
            ),
            dict(
                shortcut="ran through the field of an angry bull",
                stuck="had to climb a tree, with the bull under it",
                freed="opened the gate at the other end, and the bull ran out",
            ),
            dict(
                shortcut="ran through an orchard",
                stuck="ate so many apples that {friend.he} could not walk",
                freed="carried {friend.him} back to the road",
            ),
        )
    ),
)

# ------------------------------------------------------------------------------------------ a ghost that is none at all

GHOST = Plot(
    nature="{hero.He} was small, but {hero.he} was brave.",
    before=(
        (
            "For three nights {hero} heard a strange sound from {place}. It was {sound}.",
            "One [dark|cold|windy] night, {hero} heard {sound}. It came from {place}.",
            "{hero} could not sleep. Every night {sound} came from {place}.",
        ),
        (
            '"It is a ghost," said {companion}. "I will not go near it."',
            '"[There is|It must be] a ghost in {place}," said {companion}, and {friend.his} voice shook.',
            'Everyone said that it was a ghost. "[Stay here|Do not go]," said {companion} to {hero}.',
        ),
    ),
    after=(
        (
            "{hero} was afraid too, but {hero.he} [took|lit] a [candle|lantern] and went to look.",
            '"[A ghost|Then I want to see it]," said {hero}. {hero.He} took a lantern and opened the door.',
        ),
        (
            "{hero.His} heart beat like a drum.",
            "It was so dark that {hero.he} could not see {hero.his} own feet.",
            "{friend} came too, step by step behind {hero.him}.",
        ),
        ("There was no ghost. {cause}.", "And what did {hero.he} find? {cause}."),
        ("{hero} {cure}.",),
        (
            '"{jest}," said {friend}, and they laughed all the way home.',
            '"{jest}!" {hero} [said to|told] {friend}. After that everyone in the village slept well.',
            '"{jest}," said {hero}. "I was never afraid," said {friend}.',
        ),
    ),
    matters=(
        dict(
            place="the old mill",
            sound="a long, low cry",
            cause="The wind came in through a hole in the wall and sang",
            cure="filled the hole with wool, and the cry stopped",
            jest="So our ghost is only the wind",
        ),
        dict(
            place="the tower",
            sound="a knock and then another",
            cause="A young owl was caught behind the window and beat the glass with its beak",
            cure="opened the window, and the owl flew out over the roofs",
            jest="So our ghost has wings",
        ),
        dict(
            place="the cellar",
            sound="a small, sad voice",
            cause="A wet cat sat on the stairs and could not get out",
            cure="carried the cat up the stairs and gave it milk",
            jest="So our ghost drinks milk",
        ),
        dict(
            place="the church",
            sound="a bell in the middle of the night",
            cause="A hungry goat was chewing the rope of the bell",
            cure="led the goat home and gave it a cabbage",
            jest="So our ghost eats cabbage",
        ),
        dict(
            place="the attic",
            sound="the sound of small feet",
            cause="A mouse was pushing a nut across the floor",
            cure="gave the mouse a piece of cheese and a bed of wool",
            jest="So our ghost likes nuts",
        ),
        dict(
            place="the barn",
            sound="a deep, slow breath",
            cause="A grey donkey had lost its way and was asleep in the corn",
            cure="brought the donkey back to the farmer in the morning",
            jest="So our ghost has long ears",
        ),
        dict(
            place="the well",
            sound="a deep voice",
            cause="A fat frog sat in the bucket and sang",
            cure="lifted out the frog and carried it to the pond",
            jest="So our ghost is green",
        ),
        dict(
            place="the forge",
            sound="a knock and then another",
            cause="A board hung from one nail, and the wind beat it against the wall",
            cure="took a hammer and nailed the board back",
            jest="So our ghost is made of wood",
        ),
    ),
)

# ---------------------------------------------------------------------------------------- a seed, a danger and patience

PLANTS = (
    dict(
        plant="pumpkin",
        grown="a pumpkin so big that two people could sit in it",
        harvest="{hero} made soup from it for the whole village",
    ),
    dict(
        plant="flower",
        grown="a yellow flower that was taller than the roof",
        harvest="All winter {hero} fed the birds with its seeds",
    ),
    dict(
        plant="bean",
        grown="a bean that climbed up to the chimney",
        harvest="{hero} picked beans from the window every morning",
    ),
    dict(
        plant="rose",
        grown="a rose that covered the whole wall with red flowers",
        harvest="{hero} gave one to every neighbour",
    ),
    dict(
        plant="cabbage",
        grown="a cabbage that four people could not lift",
        harvest="{hero} cut it up, and the whole street ate from it",
    ),
)

DANGERS = (
    dict(
        danger="it did not rain for weeks",
        care="{hero} carried water from the river, one bucket after the other",
    ),
    dict(
        danger="a hundred snails came into the garden",
        care="{hero} picked up the snails by the light of a lantern and carried them to the meadow",
    ),
    dict(
        danger="one night it was as cold as in winter",
        care="{hero} took the blanket from {hero.his} own bed and put it over the garden",
    ),
    dict(
        danger="hungry crows came into the garden",
        care="{hero} put {hero.his} old coat and hat on a stick, and the crows flew away",
    ),
    dict(
        danger="a storm beat on the garden",
        care="{hero} stood in the rain and held an umbrella over it all night",
    ),
)

PATIENCE = Plot(
    nature="{hero.He} knew how to wait.",
    before=(
        (
            "{One_day}, {hero} bought {plant_a} seed [in town|from an old woman].",
            "{hero} had {plant_a} seed, and {hero.he} wanted to plant it.",
            "{One_day}, {hero} found {plant_a} seed in {hero.his} pocket.",
        ),
        (
            '"Nothing will grow in your garden," said {companion}. "It is full of stones."',
            '{Companion} looked at the garden and laughed. "Only stones grow here," {friend.he} said.',
        ),
        (
            "{hero} took out the stones, planted the seed and gave it water every [morning|evening].",
            "So {hero} took out the stones, one by one, and planted the seed. For weeks there was nothing to see.",
        ),
    ),
    after=(
        (
            "Then a little green leaf came up, but {danger}. {care}.",
            "When it had two green leaves, {danger}. {care}.",
            "Soon something green came up, but {danger}. {care}.",
        ),
        (
            "[In the autumn|At the end of the summer] there stood {grown}. {harvest}.",
            "And it grew and grew, until there stood {grown}. {harvest}.",
        ),
        (
            '"I was wrong about the garden," said {friend}. "It only needed time," said {hero}.',
            '"How did you do it?" asked {friend}. "I waited," said {hero}.',
            "And {friend} went home and took the stones out of {friend.his} own garden.",
            '"Will you give me a seed too?" asked {friend}. "Of course," said {hero}.',
        ),
    ),
    matters=tuple(
        dict(plant_a=with_article(plant["plant"]), **plant, **danger) for plant, danger in product(PLANTS, DANGERS)
    ),
)

# -------------------------------------------------------------------------------------- a hard road to somebody in need

ERRANDS = (
    dict(
        load="medicine",
        need="lay ill in a house on the other side of the hills",
        relief="{friend} drank the medicine and slept, and in the morning {friend.he} was well again",
    ),
    dict(
        load="bread",
        need="was alone in a hut in the snow and had nothing left to eat",
        relief="{friend} ate the bread to the last piece, and {friend.his} face was warm again",
    ),
    dict(
        load="wood",
        need="was alone on the hill and had no wood for the fire",
        relief="{friend} put the wood on the fire, and soon they both sat in front of it and were warm",
    ),
    dict(
        load="oil",
        need="looked after the light on the rocks and had no oil left for the night",
        relief="{friend} filled the lamp with the oil, and that night no ship was lost",
    ),
)

OBSTACLES = (
    dict(
        obstacle="the bridge was gone",
        overcome="{hero.He} held the {load} high over {hero.his} head and walked through the cold water",
    ),
    dict(
        obstacle="a fog came up, and {hero.he} could not see the road",
        overcome="{hero.He} put one hand on the wall and followed it, step by step",
    ),
    dict(
        obstacle="an angry dog stood on the road",
        overcome="{hero.He} gave the dog {hero.his} own supper, and it let {hero.him} through",
    ),
    dict(
        obstacle="the wind blew out the lantern",
        overcome="{hero.He} waited for the moon and walked on by its light",
    ),
    dict(
        obstacle="the snow was so deep that {hero.he} could not walk",
        overcome="{hero.He} found the path of a deer and put {hero.his} feet where it had walked",
    ),
    dict(
        obstacle="a fallen tree lay across the road",
        overcome="{hero.He} pushed the {load} under the tree and climbed over it",
    ),
)

ERRAND = Plot(
    nature="{hero.He} always did what {hero.he} promised.",
    before=(
        (
            "Bad news came to {hero}. {Companion} {need}.",
            "{One_day}, {hero} heard that {companion} {need}.",
            "It was winter when {hero} heard that {companion} {need}.",
        ),
        (
            '"[I will go|Somebody must go]," said {hero}, and {hero.he} [took the {load} and went out|put the {load} '
            "in a bag and went out] into the [wind|cold|night].",
            "{hero} put on {hero.his} coat and carried the {load} up the long road.",
        ),
    ),
    after=(
        (
            "Halfway there, {obstacle}. {overcome}.",
            "The first hours were easy. Then {obstacle}. {overcome}.",
        ),
        (
            "{hero.He} was [tired|cold] and wanted to turn back, but {hero.he} thought of {friend} and went on.",
            "{hero.His} feet were [cold|sore], but {hero.he} did not stop.",
            '"[Only a little more|Not much more now]," {hero.he} said to {hero.his} feet.',
        ),
        (
            "[In the middle of the night|At last] {hero.he} knocked at the door. {relief}.",
            "The sun was going down when {hero.he} saw {friend}'s house. {relief}.",
        ),
        (
            '"You came all this way!" said {friend}. "[I promised|It was not far]," said {hero}.',
            '"Next time I will come to you," said {friend}.',
            "{friend} never forgot that night.",
            '"Sit down by the fire," said {friend}. "[Tell me about the road|You must be tired]."',
        ),
    ),
    matters=tuple({**errand, **obstacle} for errand, obstacle in product(ERRANDS, OBSTACLES)),
)

PLOTS = (
    FOUND,
    KINDNESS,
    FORGOTTEN,
    LOST,
    TRADE,
    STRANGER,
    QUARREL,
    PRESENT,
    RACE,
    GHOST,
    PATIENCE,
    ERRAND,
)

# --------------------------------------------------------------------------------------------------------- the telling

CHOICE = re.compile(r"\[([^][]*)\]")
SLOT = re.compile(r"\{[^{}]*\}")
WORD = re.compile(r"[A-Za-z]+")

SHE = ("she", "her", "her")
HE = ("he", "him", "his")
KIN = ("friend", "neighbour", "cousin")


def chosen(text: str, rng: random.Random) -> str:
    """The text with one side taken of every choice in it."""
    while CHOICE.search(text):
        text = CHOICE.sub(lambda choice: rng.choice(choice[1].split("|")), text)
    return text


def settled(value: str | Thing, rng: random.Random) -> str | Thing:
    """A matter's value with its choices made once, so that it stays the same wherever the tale uses it."""
    return chosen(value, rng) if isinstance(value, str) else Thing(chosen(value.look, rng), value.noun)


def couple(plot: Plot) -> tuple[str, str]:
    """The woman and the man that a plot is always told of: a model this small knows a tale by its people."""
    couples = list(zip(WOMEN.split(), MEN.split(), strict=True))
    return couples[PLOTS.index(plot) % len(couples)]


def people(plot: Plot, matter: Matter, rng: random.Random) -> dict[str, str | Person]:
    """A hero and a friend, a she and a he in either order; the hero has a trade that nobody else in the matter has."""
    woman, man = couple(plot)
    she, he = (woman, *SHE), (man, *HE)
    hero, friend = rng.choice([(she, he), (he, she)])
    other, sibling = ("boy", "brother") if hero is she else ("girl", "sister")
    taken = {*matter.values(), other}
    role = rng.choice([role for role in HOMES if role.split()[-1] not in taken])
    return {
        "hero": Person(*hero, role=chosen(role, rng)),
        "friend": Person(*friend, kin=rng.choice([*KIN, sibling])),
        "home": HOMES[role],
    }


def outline(plot: Plot, rng: random.Random) -> str:
    """The plot with one way of telling chosen for each beat, its slots still open."""
    opening = rng.choice(["{opening} {nature} ", "{opening} ", ""])
    before, after = (" ".join(map(rng.choice, beats)) for beats in (plot.before, plot.after))
    return opening + before + rng.choice([" ", "\n\n"]) + after


def tale(seed: int) -> str:
    """The tale of this seed, in one or two paragraphs."""
    rng = random.Random(seed)
    plot = rng.choice(PLOTS)
    matter = rng.choice(plot.matters)
    cast = {**SHARED, "opening": rng.choice(OPENINGS), "nature": plot.nature, **people(plot, matter, rng)}
    cast |= {slot: settled(value, rng) for slot, value in matter.items()}
    text = outline(plot, rng)
    while SLOT.search(text):  # a filling may bring slots and choices of its own
        text = chosen(text.format_map(cast), rng)
    return text


def tales(count: int, seed: int) -> Iterator[str]:
    """As many tales as asked for; the streams of two seeds share a tale only by chance."""
    rng = random.Random(seed)
    return (tale(rng.getrandbits(63)) for _ in range(count))


def written(material: object) -> Iterator[str]:
    """Every string in a piece of the material, however deep it lies."""
    if isinstance(material, str):
        yield material
    elif isinstance(material, Thing):
        yield from (material.look, material.noun)
    elif isinstance(material, Mapping):
        yield from written([*material.items()])
    elif isinstance(material, Iterable):
        for part in material:
            yield from written(part)


def vocabulary() -> set[str]:
    """Every word that a tale can use; a few more too, for the names of a matter's slots are counted with its words."""
    pronouns = [form for word in SHE + HE for form in (word, word.capitalize())]
    material = [WOMEN, MEN, HOMES, OPENINGS, SHARED, PLOTS, pronouns, KIN, "sister brother a an The"]
    return {word for text in written(material) for word in WORD.findall(SLOT.sub(" ", text))}
