"""The page of a report: complete in itself, and its plots show something in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape
from pathlib import Path

import numpy as np
import pytest

from lexshard.loadtest.bench.load.figures import Objective
from lexshard.loadtest.bench.load.load_report import LoadReport
from lexshard.loadtest.bench.load.timeline import LoadRun, RequestTimeline
from lexshard.loadtest.report.figures import FIGURES, Figure
from lexshard.loadtest.report.overview import write_overview
from lexshard.serve_app.cli import main, parser_of
from tests.support.paths import ROOT

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1200, 4500


def load_run(endpoint: str, rate: float, slowness: float) -> LoadRun:
    chance = np.random.default_rng(round(rate))
    requests = []
    for sent in np.cumsum(chance.exponential(1 / rate, 120)):
        gaps = slowness * chance.gamma(4.0, 0.005, 20)
        first = sent + slowness * chance.gamma(2.0, 0.05)
        pieces = tuple(float(first + each) for each in np.cumsum(gaps))
        requests.append(RequestTimeline(sent, sent, pieces[-1], pieces, 50, 20))
    return LoadRun(endpoint, rate, 0, tuple(requests), (0.001,) * 9)


def write_report(path: Path, *rates: float) -> None:
    machine = {"processor": "A <processor>", "cores": 2, "system": "Linux"}
    report = LoadReport(machine, {"python": "3.11"}, "lexshard bench serve --against <x>", 1)
    report.objectives = (Objective("ttft", 200.0),)
    for rate in rates:
        runs = [load_run("lexshard", rate, 1.0), load_run("another", rate, 2.5)]
        report.add_runs({"rate": rate, "arrivals": "poisson"}, runs, ours="lexshard")
    report.write(path)


def page_of(folder: Path, *rates: float) -> Path:
    write_report(folder / "load.json", *rates)
    assert main(["report", str(folder / "load.json"), "--out", str(folder / "load.html")]) == 0
    return folder / "load.html"


def test_a_page_is_complete_in_itself(tmp_path: Path) -> None:
    text = page_of(tmp_path, 2.0).read_text(encoding="utf-8")
    assert "<script" not in text
    assert not re.search(r'(src|href)\s*=\s*"(?!#)', text.replace("xlink:href", "href"))
    assert "@import" not in text
    assert "A &lt;processor&gt;" in text
    assert text.count("<svg") == 6
    for title in ("TTFT, 2 requests/s", "ITL, 2 requests/s", "Requests in flight, 2 requests/s"):
        assert title in text


def test_files_of_other_benchmarks_become_a_page_too(tmp_path: Path) -> None:
    files = [ROOT / "docs" / "results" / name for name in ("engine.json", "verify.json")]
    out = tmp_path / "page.html"
    assert main(["report", *map(str, files), "--out", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    assert text.count("<h2>") == 2
    assert "How many times better ours is" in text
    first = json.loads(files[0].read_text(encoding="utf-8"))["results"][0]
    assert first["name"] in text


@pytest.mark.parametrize("content", ["no JSON", "[]", '{"results": []}'])
def test_what_no_benchmark_wrote_is_refused(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file.json"
    path.write_text(content)
    assert main(["report", str(path), "--out", str(tmp_path / "page.html")]) == 1
    assert str(path) in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


@pytest.mark.slow
def test_plots_show_something_in_a_browser(tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    page, picture = page_of(tmp_path, 2.0, 8.0), tmp_path / "page.png"
    assert page.read_text(encoding="utf-8").count("<svg") == 2 * 6
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={WIDTH},{HEIGHT}"]
    command += [f"--screenshot={picture}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    from matplotlib.image import imread

    pixels = np.asarray(imread(picture))[..., :3]  # [height, width, 3], 0 to 1
    for wanted in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)):  # a line of each endpoint
        near = np.abs(pixels - np.array(wanted) / 255).max(axis=2) < 0.1
        rows = near.any(axis=1)
        assert near.sum() > 3000
        # Plots all over the page: in many of its bands, not in one corner.
        assert sum(band.any() for band in np.array_split(rows, 20)) >= 8


@pytest.mark.slow
def test_the_overview_has_a_figure_of_every_result_and_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Never a zero: of no results at all every figure is missing."""
    out = tmp_path / "all" / "index.html"
    results = ROOT / "docs" / "results"
    assert main(["report", "--results", str(results), "--out", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    assert "<script" not in text
    for figure in FIGURES:
        there = (results / figure.file).is_file()
        section = text.split(f'<h2 id="{figure.name}">')[1].split("<h2")[0]
        assert ("<svg" in section) == there
        assert ("Missing." in section) == (not there)
        if there:
            told = json.loads((results / figure.file).read_text(encoding="utf-8"))
            assert told["date"] in section
            assert escape(told["command"]) in section
    empty = tmp_path / "none"
    empty.mkdir()
    out = tmp_path / "missing.html"
    assert main(["report", "--results", str(empty), "--out", str(out)]) == 0
    assert "<svg" not in out.read_text(encoding="utf-8")
    assert out.read_text(encoding="utf-8").count("Missing.") == len(FIGURES)
    (empty / "head.json").write_text("{")
    assert main(["report", "--results", str(empty), "--out", str(out)]) == 1
    assert main(["report", "--results", str(tmp_path / "no"), "--out", str(out)]) == 1
    assert "name files" in capsys.readouterr().err


@pytest.mark.parametrize("figure", [each for each in FIGURES if each.command], ids=lambda f: f.name)
def test_the_command_of_a_figure_is_one_that_there_is(figure: Figure) -> None:
    command = figure.command.split()
    words = 2 if command[1] == "bench" else 1
    parser_of(tuple(command[1 : words + 1])).parse_args(command[words + 1 :])


def test_a_result_without_values_makes_a_missing_figure(tmp_path: Path) -> None:
    (tmp_path / "rest.json").write_text('{"results": [], "ratios": []}')
    missing = write_overview(tmp_path, tmp_path / "page.html")
    assert missing == [figure.name for figure in FIGURES]
