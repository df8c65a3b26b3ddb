"""Builds the site: the pages of this folder, and whatever they link to, as HTML that needs nothing from the network.

python docs/learn/build.py [--out site]      the site
python docs/learn/build.py --index           the lists of pages in README.md
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from html import escape
from pathlib import Path
from typing import Any

import jinja2
import pygments
from markdown_it import MarkdownIt
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_by_name, get_lexer_for_filename
from pygments.util import ClassNotFound

sys.path.insert(0, str(Path(__file__).parent))
from figures import Measured, columns, duration, short

from flashkernels.hardware import Gpu, lookup
from flashkernels.profiling import drawing, roofline

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PARTS = {"attention": "Attention", "moe": "Mixture of experts", "quantisation": "Quantisation", "ground": "The ground"}
WORD = re.compile(r"^\{\{(\w+)(?: (.+))?\}\}$")
LIST = re.compile(r"(<!-- pages (\w+) -->\n).*?(<!-- /pages -->)", re.DOTALL)


class PageError(ValueError):
    """A page says something that cannot be built; the message says where."""


@dataclass(frozen=True)
class Run:
    """A file of measurements: by the name of a lesson its cases, or why it has none."""

    lessons: dict[str, Any]

    def rows(self, name: str) -> list[Measured]:
        return [Measured(**case) for case in self.lessons.get(name, {}).get("cases", [])]

    def meta(self, name: str) -> dict[str, Any]:
        return self.lessons[name]["meta"]

    def gpu(self, name: str) -> Gpu:
        return lookup(self.meta(name)["gpu"])


@dataclass
class Site:
    """The pages to write, by the file that each is made of; a link to a new file adds it."""

    out: Path
    runs: list[Run]
    queue: list[Path] = field(default_factory=list)

    def build(self) -> list[Path]:
        """Writes every page; returns their paths."""
        self.queue = [HERE / "README.md", *(page for part in PARTS for page in pages(part))]
        written = []
        for source in self.queue:  # grows while it is walked
            target = self.target(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(self.page(source), encoding="utf-8")
            written.append(target)
        return written

    def target(self, source: Path) -> Path:
        """Where a file's page is: lessons at the top, all else by its path in the repository."""
        if source.is_relative_to(HERE) and source.suffix == ".md":
            path = source.relative_to(HERE)
            return self.out / (path.with_name("index.html") if path.name == "README.md" else path.with_suffix(".html"))
        return self.out / "files" / source.relative_to(ROOT).with_name(source.name + ".html")

    def page(self, source: Path) -> str:
        text = source.read_text(encoding="utf-8")
        if source.suffix == ".md":
            filled = "\n".join(fill(text, source, self.runs)) if source.is_relative_to(HERE) else text
            body = markdown(filled, partial(self.link, source))
        else:
            body = f"<h1>{escape(source.name)}</h1>\n<pre><code>{coloured(text, source.name)}</code></pre>"
        return template().render(title=title(source), body=body, **self.places(source))

    def link(self, source: Path, address: str) -> str:
        """Where a link of a page leads: to a page here, which is made if need be, or out into the world."""
        if re.match(r"\w+:|#", address):
            return address
        path, _, anchor = address.partition("#")
        wanted = (source.parent / path).resolve()
        if not wanted.is_file() or not wanted.is_relative_to(ROOT):
            raise PageError(f"{source.relative_to(ROOT)}: the link {address!r} leads to no file of the repository")
        if wanted not in self.queue:
            self.queue.append(wanted)
        return self.relative(source, wanted) + (f"#{anchor}" if anchor else "")

    def relative(self, source: Path, wanted: Path) -> str:
        return Path(os.path.relpath(self.target(wanted), self.target(source).parent)).as_posix()

    def places(self, source: Path) -> dict[str, Any]:
        """What the navigation shows: the parts, the pages of this one's part, and its neighbours."""
        order = [HERE / "README.md", *(page for part in PARTS for page in pages(part))]
        part = source.parent.name if source.parent.parent == HERE else ""
        to = partial(self.relative, source)
        at = order.index(source) if source in order else None
        before = order[at - 1] if at else None
        after = order[at + 1] if at is not None and at + 1 < len(order) else None
        return {
            "parts": [("Learn", to(order[0]), source == order[0])]
            + [(name, to(pages(key)[0]), key == part) for key, name in PARTS.items() if pages(key)],
            "steps": [(title(page), to(page), page == source) for page in pages(part)[1:]] if part in PARTS else [],
            "before": (title(before), to(before)) if before else None,
            "after": (title(after), to(after)) if after else None,
        }


def pages(part: str) -> list[Path]:
    """The pages of a part: its README, then its lessons by number."""
    numbered = sorted((HERE / part).glob("[0-9]*.md"), key=lambda path: int(path.name.split("_")[0]))
    return [path for path in [HERE / part / "README.md"] if path.exists()] + numbered


def title(source: Path) -> str:
    """The first heading of a page; of another file its name."""
    text = source.read_text(encoding="utf-8") if source.suffix == ".md" else ""
    heading = re.search(r"^# (.+)", text, re.MULTILINE)
    return heading[1] if heading else source.name


def fill(text: str, source: Path, runs: list[Run]) -> Iterator[str]:
    """The lines of a page with its words filled in; those inside of code stay."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        fenced ^= line.startswith("```")
        word = None if fenced else WORD.match(line)
        if word is None:
            yield line
            continue
        try:
            yield from WORDS[word[1]](source, runs, word[2])
        except (KeyError, PageError) as error:
            why = error if isinstance(error, PageError) else f"there is only {', '.join(WORDS)}"
            raise PageError(f"{source.relative_to(ROOT)}:{number}: {line}: {why}") from None


def code(source: Path, runs: list[Run], what: str | None) -> Iterator[str]:
    """A function of a program, as it stands there."""
    file, _, name = (what or "").rpartition(":")
    program = source.parent / file if file else source.with_suffix(".py")
    if not program.is_file():
        raise PageError(f"no program {program.relative_to(ROOT)}")
    text = program.read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield from ["```python", *text.splitlines()[first - 1 : node.end_lineno], "```"]
            return
    raise PageError(f"{program.relative_to(ROOT)} has no function {name!r}")


def measured(source: Path, runs: list[Run], _: str | None) -> Iterator[str]:
    """The figures of a page's lesson, from every file of measurements."""
    name = name_of(source)
    found = [run for run in runs if name in run.lessons]
    if not found:
        yield from ['<p class="note">Not measured yet.</p>', ""]
    for run in found:
        if reason := run.lessons[name].get("failed"):
            yield from [f'<p class="note">Not measured: {escape(reason)}.</p>', ""]
            continue
        meta = run.meta(name)
        yield from _table(*columns(run.rows(name), run.gpu(name)))
        yield from [f'<p class="quiet">{_when(meta)}. GB/s are of the bytes that this version moves.</p>', ""]


def steps(source: Path, runs: list[Run], _: str | None) -> Iterator[str]:
    """The lessons of a part, each with the figures of its first case."""
    part = source.parent.name
    for run in [one for one in runs if any(one.rows(name_of(page)) for page in pages(part)[1:])] or [Run({})]:
        lines = []
        names = [name_of(page) for page in pages(part)[1:] if run.rows(name_of(page))]
        for page in pages(part)[1:]:
            link = f'<a href="{page.stem}.html">{escape(title(page))}</a>'
            rows = run.rows(name_of(page))
            figures = _figures(rows[0], run.gpu(name_of(page))) if rows else ["not measured yet", "", "", ""]
            lines.append([link, *figures])
        yield from _table(["lesson", "time", "TFLOPS", "GB/s", "over the floor"], lines, raw=True)
        if names:
            yield from [f'<p class="quiet">{_when(run.meta(names[-1]))}.</p>', ""]


def picture(source: Path, runs: list[Run], _: str | None) -> Iterator[str]:
    """The first case of each lesson of a part under the roofs of its GPU."""
    drawn = False
    for run in runs:
        rows = [(page, run.rows(name_of(page))[0]) for page in pages(source.parent.name)[1:] if run.rows(name_of(page))]
        rows = [(page, row) for page, row in rows if row.flops]
        if not rows:
            continue
        drawn = True
        points = [_point(page, row) for page, row in rows]
        dtypes = list(dict.fromkeys(point.dtype for point in points))
        roofs = roofline.roofs_for(run.gpu(name_of(rows[0][0])).name, None, dtypes)
        scene = roofline.draw(roofs, points, with_study=False, across="FLOP per byte that this version moves")
        caption = f"Each lesson's first case; both axes are logarithmic. {_when(run.meta(name_of(rows[0][0])))}."
        yield f'<figure id="roofline"><figcaption>{caption}</figcaption><div class="wide">'
        yield from [drawing.svg(scene, "Roofline"), "</div></figure>", ""]
    if not drawn:
        yield from ['<p class="note">No picture yet: no lesson of this part is measured.</p>', ""]


def _point(page: Path, row: Measured) -> roofline.Point:
    number, _, name = page.stem.partition("_")
    case = f"{page.parent.name} {name}"
    return roofline.Point(
        row.flops / row.moved, 1e12 * row.tflops, f"{number}.", case, False, row.dtype, row.ms / 1e3
    )


WORDS = {"measured": measured, "code": code, "steps": steps, "roofline": picture}


def name_of(page: Path) -> str:
    return page.relative_to(HERE).with_suffix("").as_posix()


def _figures(row: Measured, gpu: Gpu) -> list[str]:
    return [duration(row.ms), short(row.tflops), f"{row.gbps:.0f}", f"{row.ms / row.least(gpu):.1f}x"]


def _table(head: list[str], lines: list[list[str]], *, raw: bool = False) -> Iterator[str]:
    shown = (lambda cell: cell) if raw else escape
    yield '<div class="wide"><table>'
    yield f"<thead><tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr></thead>"
    yield from (f"<tr>{''.join(f'<td>{shown(cell)}</td>' for cell in line)}</tr>" for line in lines)
    yield from ["</table></div>", ""]


def _when(meta: dict[str, Any]) -> str:
    versions = f"torch {meta['torch']}, triton {meta['triton']}"
    return escape(f"{meta['gpu']}, {meta['date'][:10]}, commit {(meta['commit'] or 'unknown')[:10]}, {versions}")


def markdown(text: str, link: Any) -> str:
    """HTML of a page: links through `link`, code coloured, tables in boxes that scroll, `- [ ]` as boxes to tick."""
    parser = MarkdownIt("commonmark", {"html": True, "highlight": lambda code, name, _: coloured(code, name)})
    parser.add_render_rule("table_open", lambda *_: '<div class="wide"><table>\n')
    parser.add_render_rule("table_close", lambda *_: "</table></div>\n")
    tokens = parser.enable("table").parse(text)
    for token in tokens:
        for child in token.children or []:
            if child.type == "link_open":
                child.attrSet("href", link(str(child.attrGet("href"))))
    page = parser.renderer.render(tokens, parser.options, {})
    return re.sub(r"<li>(\s*<p>)?\[ \] ", r'<li class="open">\1', page)


def coloured(text: str, name: str) -> str:
    """Code in colours, by its language or its file's name."""
    try:
        lexer = get_lexer_for_filename(name) if "." in name else get_lexer_by_name(name or "text")
    except ClassNotFound:
        lexer = TextLexer()
    return pygments.highlight(text, lexer, HtmlFormatter(nowrap=True))


@cache
def template() -> jinja2.Template:
    """The page, inside the frame and with the style of the report."""
    loader = jinja2.ChoiceLoader(
        [jinja2.FileSystemLoader(HERE), jinja2.PackageLoader("flashkernels.profiling", "page")]
    )
    return jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True).get_template("page.html.j2")


def read_runs(folder: Path) -> list[Run]:
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            run = Run(json.loads(path.read_text(encoding="utf-8"))["lessons"])
            for name in run.lessons:
                if "failed" not in run.lessons[name]:
                    run.rows(name), run.gpu(name)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PageError(f"{path}: not a file of measurements: {error!r}") from error
        found.append(run)
    return found


def index(text: str) -> str:
    """README.md with its lists of pages."""

    def written(match: re.Match[str]) -> str:
        lines = [f"- [{title(page)}]({page.relative_to(HERE).as_posix()})\n" for page in pages(match[2])]
        return match[1] + "".join(lines) + match[3]

    return LIST.sub(written, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "site", metavar="FOLDER")
    parser.add_argument("--index", action="store_true", help="only write the lists of pages in README.md")
    args = parser.parse_args()
    if args.index:
        readme = HERE / "README.md"
        readme.write_text(index(readme.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    try:
        written = Site(args.out.resolve(), read_runs(HERE / "results")).build()
    except PageError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(written)} pages: open {args.out / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
