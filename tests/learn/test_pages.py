"""The pages tell the truth: their code runs, the site builds, every link leads somewhere, every word is filled."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("markdown_it")
pytest.importorskip("jinja2")
ROOT = Path(__file__).parents[2]
LEARN = ROOT / "docs" / "learn"
PAGES = sorted([LEARN / "README.md", *LEARN.glob("*/*.md")])
LESSONS = [page for page in PAGES if page.with_suffix(".py").exists()]
PART = "attention"


def loaded(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


chromium = loaded("learn_browser", ROOT / "tests" / "profiling" / "browser.py")


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def names(paths: list[Path]) -> list[Any]:
    return [pytest.param(path, id=name_of(path).replace("/", "-")) for path in paths]


def name_of(path: Path) -> str:
    return path.relative_to(LEARN).with_suffix("").as_posix()


@pytest.mark.parametrize("page", names([page for page in PAGES if blocks(page)]))
def test_the_code_of_a_page_runs(page: Path, folder_of_lessons: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(page.parent)
    monkeypatch.syspath_prepend(page.parent)
    namespace: dict[str, Any] = {"__name__": "__page__"}
    for number, block in enumerate(blocks(page), 1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)


@pytest.mark.parametrize("page", names(LESSONS))
def test_a_lesson_has_its_figures(page: Path) -> None:
    assert re.search(r"^\{\{measured\}\}$", page.read_text(encoding="utf-8"), re.MULTILINE)


def test_every_program_has_a_page() -> None:
    programs = {path.relative_to(LEARN).with_suffix("") for path in LEARN.glob("*/[0-9]*.py")}
    assert programs <= {page.relative_to(LEARN).with_suffix("") for page in PAGES}


@pytest.fixture(scope="module")
def build() -> ModuleType:
    return loaded("learn_build", LEARN / "build.py")


def case(name: str, ms: float) -> dict[str, Any]:
    return {
        "name": name, "dtype": "fp16", "flops": 1.4e11, "floor": 6.7e7, "moved": 4.4e9, "ms": ms, "error": 1e-4,
        "allowed": 1e-3,
    }  # fmt: skip


@pytest.fixture
def run(build: ModuleType) -> Any:
    """Invented figures for every lesson of a part, of an H200."""
    meta = {"gpu": "NVIDIA H200", "date": "2026-01-02T03:04:05", "commit": "abcdef0123456789"}
    meta |= {"torch": "2", "triton": "3"}
    return build.Run(
        {name_of(one): {"meta": meta, "cases": [case("one", i + 0.5), case("<b>", 9)]} for i, one in enumerate(LESSONS)}
    )


class Links(HTMLParser):
    """What a page refers to, the places in it that can be referred to, and its text outside of code."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.to: list[str] = []
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.text, self._code = "", 0
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self._code += tag in ("code", "script", "style")
        self.ids |= {str(found["id"])} if "id" in found else set()
        if tag == "a" and found.get("href"):
            self.to.append(str(found["href"]))
        elif found.get("src") or (tag == "link" and found.get("href")):
            self.loads.append(str(found.get("src") or found.get("href")))

    def handle_endtag(self, tag: str) -> None:
        self._code -= tag in ("code", "script", "style")

    def handle_data(self, data: str) -> None:
        self.text += "" if self._code else data


@pytest.mark.parametrize("figures", [False, True], ids=["not-measured", "measured"])
def test_every_link_leads_somewhere_and_every_word_is_filled(
    figures: bool, build: ModuleType, run: Any, tmp_path: Path
) -> None:
    written = build.Site(tmp_path, [run] if figures else []).build()
    assert len(written) == len(set(written)) > len(PAGES)
    pages = {path.resolve(): Links(path) for path in written}
    for path, page in pages.items():
        assert not page.loads, f"{path} needs {page.loads}"
        assert "{{" not in page.text, f"{path} has a word that is not filled"
        for link in page.to:
            if re.match(r"https?:", link):
                continue
            target, _, anchor = link.partition("#")
            wanted = (path.parent / target).resolve() if target else path
            assert wanted in pages, f"{path}: {link}"
            assert not anchor or anchor in pages[wanted].ids, f"{path}: {link}"
    reached, queue = set(), [(tmp_path / "index.html").resolve()]
    while queue:
        path = queue.pop()
        if path not in reached:
            reached.add(path)
            queue += [(path.parent / link.partition("#")[0]).resolve() for link in pages[path].to if ":" not in link]
    assert reached >= set(pages), "every page can be reached from the first"


def test_a_page_without_figures_says_so(build: ModuleType, run: Any, tmp_path: Path) -> None:
    build.Site(tmp_path, []).build()
    assert "Not measured yet." in (tmp_path / PART / "4_fused.html").read_text()
    overview = (tmp_path / PART / "index.html").read_text()
    assert "not measured yet" in overview and "No picture yet" in overview

    build.Site(tmp_path, [build.Run({f"{PART}/4_fused": {"failed": "x < 3"}})]).build()
    assert "Not measured: x &lt; 3." in (tmp_path / PART / "4_fused.html").read_text()


def test_a_page_shows_its_figures_with_their_origin(build: ModuleType, run: Any, tmp_path: Path) -> None:
    build.Site(tmp_path, [run]).build()
    page = (tmp_path / PART / "1_naive.html").read_text()
    assert "Not measured" not in page
    for words in ("<td>500 µs</td>", "<td>280</td>", "<td>8800</td>", "<td>&lt;b&gt;</td>"):
        assert words in page
    assert "NVIDIA H200, 2026-01-02, commit abcdef0123" in page
    # 4.4 GB at 4.8 TB/s are 0.917 ms: more than the 0.5 ms that were invented. The floor is 0.1415 ms of products.
    assert "<td>memory</td><td>183%</td><td>3.5x</td>" in page
    overview = (tmp_path / PART / "index.html").read_text()
    assert overview.count("<circle") == len([page for page in LESSONS if page.parent.name == PART])
    assert "FLOP per byte that this version moves" in overview
    assert 'data-tip="1.: attention naive, 280 TFLOPS, 32 FLOP/byte, 500 µs, 183% of the roof"' in overview


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{{nothing}}", "4_fused.md:1: {{nothing}}: there is only measured, code, steps, roofline"),
        ("\n{{code nothing}}", "4_fused.md:2: {{code nothing}}: docs/learn/attention/4_fused.py has no function"),
        ("{{code 0_none.py:kernel}}", "no program docs/learn/attention/0_none.py"),
    ],
    ids=["word", "function", "program"],
)  # fmt: skip
def test_a_word_that_means_nothing_is_an_error(text: str, words: str, build: ModuleType) -> None:
    with pytest.raises(build.PageError, match=re.escape(words)):
        list(build.fill(text, LEARN / PART / "4_fused.md", []))


def test_words_in_code_stay(build: ModuleType) -> None:
    text = "```text\n{{nothing}}\n```\nsay `{{nothing}}`"
    assert "\n".join(build.fill(text, LEARN / "README.md", [])) == text


def test_a_link_to_nowhere_is_an_error(build: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(build.PageError, match=r"the link '\.\./none\.md' leads to no file"):
        build.Site(tmp_path, []).link(LEARN / PART / "4_fused.md", "../none.md")


@pytest.mark.parametrize("text", ["", "[]", '{"lessons": {"a/1_b": {"cases": [{}]}}}'], ids=["empty", "list", "case"])
def test_a_file_that_is_no_measurement_is_an_error(text: str, build: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "h200.json").write_text(text)
    with pytest.raises(build.PageError, match=r"h200\.json: not a file of measurements"):
        build.read_runs(tmp_path)


def test_committed_figures_are_of_lessons_that_exist(build: ModuleType) -> None:
    for path in (LEARN / "results").glob("*.json"):
        assert all((LEARN / f"{name}.py").exists() for name in json.loads(path.read_text())["lessons"])
    build.read_runs(LEARN / "results")


def test_the_index_lists_every_page(build: ModuleType) -> None:
    text = (LEARN / "README.md").read_text(encoding="utf-8")
    assert build.index(text) == text, "run python docs/learn/build.py --index"
    for key, name in build.PARTS.items():
        assert f"## {name}\n\n<!-- pages {key} -->" in text
    assert {path.name for path in LEARN.iterdir() if list(path.glob("[0-9]*.md"))} <= set(build.PARTS)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if chromium.found() is None:
        pytest.skip(f"no browser here: none of {', '.join(chromium.NAMES)}")
    one = chromium.Browser(tmp_path_factory.mktemp("profile"))
    yield one
    one.close()


def test_pages_in_a_browser(build: ModuleType, run: Any, page: Any, tmp_path: Path) -> None:
    from PIL import Image

    written = build.Site(tmp_path / "site", [run]).build()
    for i, path in enumerate(written):
        width = (1200, 390)[i % 2]
        page.errors.clear()
        page.requests.clear()
        page.open(path, width=width, dark=i % 3 == 0)
        assert not page.errors, path
        assert [one for one in page.requests if not one.startswith("file:")] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{path} is wider than {width}"
        if i < 3:
            page.screenshot(tmp_path / "page.png")
            with Image.open(tmp_path / "page.png") as image:
                assert len(image.convert("RGB").resize((200, 150)).getcolors(200 * 150) or []) > 50, f"{path} is blank"
