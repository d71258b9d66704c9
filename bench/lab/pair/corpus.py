"""The text of the bundled pair: which books, how they are cleaned, what is held out.

    python corpus.py heldout books-train.txt.xz --out DIR       # held-out texts and their prompts
    python corpus.py training books-train.txt.xz --out FILE     # for the drafter: training.jsonl

A corpus file holds many books, each beginning with a line "Title: ..."; see `heldout_titles.txt`.
"""

import argparse
import json
import lzma
import re
from pathlib import Path

HELDOUT_TITLES = Path(__file__).with_name("heldout_titles.txt")
TRAIN_TITLES = Path(__file__).with_name("train_titles.txt")

PROMPT_PLACES = (0.1, 0.3, 0.5, 0.7, 0.9)  # where in a held-out book its prompts are taken
PROMPT_WORDS = 32
PROMPT_PARAGRAPH_WORDS = 60  # a prompt opens a paragraph at least this long

_HEADER = re.compile(r"^Title:(.*)$", re.MULTILINE)
_RULE = re.compile(r"^-{5,}\s*$", re.MULTILINE)
_ELISION = re.compile(
    r"(?<![A-Za-z])'(?=(?:tis|twas|twere|twill|twould|em|un|ee|cause|bout)\b)", re.IGNORECASE
)
_OPENING_QUOTE = re.compile(r"(?<![A-Za-z.,;:!?])'(?=[A-Za-z])")
_CLOSING_QUOTE = re.compile(r"(?<=[.,;:!?-])'(?![A-Za-z])")
_NOT_PROSE = re.compile(r"gutenberg|copyright|illustration|\[|\{|<|\||=|http", re.IGNORECASE)


def read_corpus(path: Path) -> dict[str, str]:
    """Raw text of every book in a corpus file (plain or .xz), by title."""
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        text = file.read()
    headers = list(_HEADER.finditer(text))
    ends = [header.start() for header in headers[1:]] + [len(text)]
    books = {}
    for header, end in zip(headers, ends, strict=True):
        rule = _RULE.search(text, header.end(), end)
        books[header[1].strip()] = text[rule.end() if rule else header.end() : end]
    return books


def read_titles(path: Path) -> dict[str, int]:
    """Titles of a list with their weights: `weight<TAB>title` or a title; `#` begins a comment."""
    titles = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            weight, _, title = line.rpartition("\t")
            titles[title.strip()] = int(weight or 1)
    return titles


def clean_book(raw: str) -> list[str]:
    """Paragraphs of running prose, one line each, in double quotes; no headings, verse or notes."""
    paragraphs = [p.strip() for p in re.split(r"\n\s*\n", raw)]
    if raw.count('"') < 1.5e-3 * len(raw):
        paragraphs = [_double_quotes(p) for p in paragraphs]
    broken = [p for p in paragraphs if "\n" in p]
    # Otherwise a paragraph of several lines is verse or a table.
    hard_wrapped = len(broken) > len(paragraphs) / 3
    kept = []
    for paragraph in paragraphs:
        if "\n" in paragraph and not hard_wrapped:
            continue
        paragraph = re.sub(r"(?<=[a-z])-\n(?=[a-z])", "-", re.sub(r"[_*]", "", paragraph))
        paragraph = re.sub(r"\s+", " ", paragraph).strip()
        if _is_prose(paragraph):
            kept.append(paragraph)
    return kept


def _double_quotes(paragraph: str) -> str:
    """British 'speech' as "speech"; apostrophes stay."""
    paragraph = _ELISION.sub("\0", paragraph)
    paragraph = _CLOSING_QUOTE.sub('"', _OPENING_QUOTE.sub('"', paragraph))
    return paragraph.replace("\0", "'")


def _is_prose(paragraph: str) -> bool:
    lower = sum(c.islower() for c in paragraph)
    return (
        lower > 3 * sum(c.isupper() for c in paragraph)
        and lower > 0.6 * len(paragraph)
        and paragraph[0] in "\"'(" + "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
        and paragraph[-1] in ".!?\"':;-,)"
        and sum(not c.isascii() for c in paragraph) <= 0.02 * len(paragraph)
        and not _NOT_PROSE.search(paragraph)
    )


def training_books(corpus: Path) -> list[tuple[int, str]]:
    """(weight, cleaned text) of every selected book; held-out books are refused."""
    books = read_corpus(corpus)
    weights, forbidden = read_titles(TRAIN_TITLES), read_titles(HELDOUT_TITLES)
    if overlap := sorted(set(weights) & set(forbidden)):
        raise SystemExit(f"error: held-out books in the training selection: {', '.join(overlap)}")
    if missing := sorted(set(weights) - set(books)):
        raise SystemExit(f"error: not in {corpus.name}: {', '.join(missing)}")
    return [(weight, "\n\n".join(clean_book(books[title]))) for title, weight in weights.items()]


def heldout_books(corpus: Path) -> dict[str, list[str]]:
    """Cleaned paragraphs of every held-out book, by title."""
    books = read_corpus(corpus)
    return {title: clean_book(books[title]) for title in read_titles(HELDOUT_TITLES)}


def prompts_of(paragraphs: list[str]) -> list[str]:
    """Take the first words of the first long paragraph at or after fixed places of a book."""
    prompts = []
    for place in PROMPT_PLACES:
        following = paragraphs[int(place * len(paragraphs)) :]
        words = next(
            (w for w in map(str.split, following) if len(w) >= PROMPT_PARAGRAPH_WORDS), None
        )
        if words:
            prompts.append(" ".join(words[:PROMPT_WORDS]))
    return list(dict.fromkeys(prompts))


def write_heldout(corpus: Path, out: Path) -> None:
    """Write `<slug>.txt` per held-out book, and the prompts in `prompts.jsonl`.

    A line is {"prompt", "category"}, the category being the title.
    """
    out.mkdir(parents=True, exist_ok=True)
    books = heldout_books(corpus)
    for title, paragraphs in books.items():
        slug = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
        (out / f"{slug}.txt").write_text("\n\n".join(paragraphs) + "\n", encoding="utf-8")
    rows = [
        {"prompt": prompt, "category": title}
        for title, book in books.items()
        for prompt in prompts_of(book)
    ]
    _write_rows(out / "prompts.jsonl", rows)


def write_training(corpus: Path, out: Path) -> None:
    """Write lines {"text"}, one per training book, each once."""
    _write_rows(out, [{"text": text} for _, text in training_books(corpus)])


def _write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    heldout = commands.add_parser("heldout", help="write the held-out texts and prompts")
    training = commands.add_parser("training", help="write the training books, one a line")
    for command in (heldout, training):
        command.add_argument("corpus", type=Path)
        command.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.command == "heldout":
        write_heldout(arguments.corpus, arguments.out)
    else:
        write_training(arguments.corpus, arguments.out)


if __name__ == "__main__":
    main()
