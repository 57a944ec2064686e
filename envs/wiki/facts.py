"""Make the pages and questions of wiki-search from the tables in envs/wiki/data.

    countries.csv -> one page per country, one per capital      elements.csv -> one page per element

Every sentence of a page states one cell of a table. A cell is empty if no single value is right.
For demonstrations, `made_up_corpus` makes pages about countries and elements that do not exist,
because the policy could memorise the real pages instead of learning to search.
"""

import csv
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from random import Random
from string import ascii_lowercase, ascii_uppercase

from envs.wiki.corpus import Page, Question

Row = Mapping[str, str]  # column -> text of the cell
NUM_INVENTED_ROWS = 4  # maximum number of countries, and of elements, in a made-up corpus
LONGEST_NAME = 14
INVENTED = ("country", "capital", "currency", "language", "element")  # columns with invented names


@dataclass(frozen=True)
class Fact:
    """The sentence by which a page states the value of one column of a table."""

    section: str
    sentence: str  # template with {title} and {value}
    unique: bool = False  # whether each value identifies one row of the shipped table


FACTS = {
    "country": {
        "capital": Fact("Geography", "The capital of {title} is {value}.", unique=True),
        "continent": Fact("Geography", "The continent of {title} is {value}."),
        "currency": Fact("Economy", "The currency of {title} is the {value}."),
        "language": Fact("Society", "The official language of {title} is {value}."),
        "domain": Fact("Internet", "The internet domain of {title} is {value}.", unique=True),
    },
    "element": {
        "symbol": Fact("Basics", "The symbol of {title} is {value}.", unique=True),
        "number": Fact("Basics", "The atomic number of {title} is {value}.", unique=True),
        "family": Fact("Properties", "{title} belongs to the family {value}."),
        "state": Fact("Properties", "The state of {title} at room temperature is {value}."),
    },
}
TABLES = {"country": "countries", "element": "elements"}
NOUNS = {"language": "official language", "domain": "internet domain", "number": "atomic number"}


@cache
def shipped_corpus() -> tuple[list[Page], list[Question]]:
    tables = {kind: _read_table(f"{table}.csv") for kind, table in TABLES.items()}
    return _make_pages(tables), _make_questions(tables)


def made_up_corpus(rng: Random) -> tuple[list[Page], list[Question]]:
    tables: dict[str, list[Row]] = {}
    for kind, table in TABLES.items():
        real = _read_table(f"{table}.csv")
        columns = {name: [row[name] for row in real if row[name]] for name in real[0]}
        tables[kind] = [_invented_row(kind, columns, rng) for _ in range(NUM_INVENTED_ROWS)]
    pairs = [(kind, row) for kind, rows in tables.items() for row in rows]
    names = Counter(name for kind, row in pairs for name in _identifiers(kind, row))
    # Drop rows with a repeated identifier, because a question must have only one answer.
    unique = {
        kind: [row for row in rows if all(names[name] == 1 for name in _identifiers(kind, row))]
        for kind, rows in tables.items()
    }
    return _make_pages(unique), _make_questions(unique)


def _invented_row(kind: str, columns: Mapping[str, list[str]], rng: Random) -> Row:
    row = {column: rng.choice(cells) for column, cells in columns.items()}
    for column in INVENTED:
        if column in row:
            row[column] = invent_name(tuple(columns[column]), rng)
    if kind == "country":
        return row | {"domain": "." + "".join(rng.choices(ascii_lowercase, k=2))}
    symbol = rng.choice(ascii_uppercase) + rng.choice(["", *ascii_lowercase])
    return row | {"symbol": symbol, "number": str(rng.randrange(1, 100))}


def _identifiers(kind: str, row: Row) -> list[str]:
    return [row[kind], *(row[column] for column, fact in FACTS[kind].items() if fact.unique)]


def invent_name(known: tuple[str, ...], rng: Random) -> str:
    """Return a new name that resembles the `known` names, from a Markov chain of letters."""
    chain = _letter_chain(known)
    while True:
        name = ""
        while not name.endswith("\n"):
            name += rng.choice(chain[name[-2:]])
        name = name[:-1]
        if 3 <= len(name) <= LONGEST_NAME and name not in known:
            return name


@cache
def _letter_chain(known: tuple[str, ...]) -> dict[str, list[str]]:
    """Map two letters to all letters that follow them in `known`. A line break ends a name."""
    following: dict[str, list[str]] = defaultdict(list)
    for name in known:
        for i, letter in enumerate(name + "\n"):
            following[name[max(i - 2, 0) : i]].append(letter)
    return following


def _make_pages(tables: Mapping[str, Iterable[Row]]) -> list[Page]:
    pages = []
    for kind, rows in tables.items():
        for row in rows:
            sections: dict[str, list[str]] = defaultdict(list)
            for column, fact in FACTS[kind].items():
                if row[column]:
                    sentence = fact.sentence.format(title=row[kind], value=row[column])
                    sections[fact.section].append(sentence)
            pages.append(Page(row[kind], {name: " ".join(s) for name, s in sections.items()}))
            if kind == "country" and row["capital"]:
                sentence = f"{row['capital']} is the capital of {row['country']}."
                pages.append(Page(row["capital"], {"Overview": sentence}))
    return pages


def _make_questions(tables: Mapping[str, Iterable[Row]]) -> list[Question]:
    return [q for kind, rows in tables.items() for row in rows for q in _questions_about(kind, row)]


def _questions_about(kind: str, row: Row) -> Iterator[Question]:
    """Yield questions that contain the title (level 1), ask for it (2), or need two pages (3)."""
    title = row[kind]
    for column, fact in FACTS[kind].items():
        value = row[column]
        if not value:
            continue
        attribute = NOUNS.get(column, column)
        path = (title, fact.section)
        yield Question(f"What is the {attribute} of {title}?", value, 1, (path,))
        if fact.unique and column != "capital":
            text = f"Which {kind} has the {attribute} {value}?"
            yield Question(text, title, 2, (path,), f"{attribute} {value}")
        if kind == "country" and row["capital"] and column != "capital":
            text = f"What is the {attribute} of the country whose capital is {row['capital']}?"
            yield Question(text, value, 3, ((row["capital"], "Overview"), path))


def _read_table(name: str) -> list[Row]:
    text = (files("envs.wiki") / "data" / name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))
