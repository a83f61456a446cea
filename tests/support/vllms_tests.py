"""vLLM's own tests, without the plugin and with it: `docs/vllm.md` says what came of it.

    python -m tests.support.vllms_tests FOLDER KEEP TEST... [-- arguments of pytest]

``FOLDER`` is an unpacked source distribution of vLLM, a ``TEST`` a file or folder below its
``tests``; what was said and pytest's reports are left in ``KEEP``. Nothing is fetched: every model
that tests name is the demo, under that name in a cache of models that is made for the run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from tests.support.vllm_engines import DEMO, PYTHON

CONTEXT = 32_768  # tokens, as models that the tests name have; the demo was made for 2,048
MODEL = re.compile(r"""["']([A-Za-z0-9][A-Za-z0-9_.-]+)/([A-Za-z0-9][A-Za-z0-9_.-]+)["']""")
# The plugin leaves heads in float16 to vLLM: nothing of it would be tested.
REPLACED = {'"half"': '"bfloat16"', '"float16"': '"bfloat16"'}
# In pytest's own process plugins and kernels are loaded as in those that vLLM starts.
PROGRAM = """
import sys
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
load_general_plugins()
current_platform.register_triton_kernel_overrides()
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""
Outcomes = dict[tuple[str, str], str]  # of a test in a file


def make_tests(folder: Path, work: Path) -> list[str]:
    """vLLM's tests in ``work``, and ``work / "hub"``, a cache of models in which all that they name
    are the demo; their names."""
    shutil.copytree(folder / "tests", work / "tests")
    (work / "examples").symlink_to(folder / "examples")
    model = work / "demo"
    shutil.copytree(DEMO, model)
    settings = json.loads((model / "config.json").read_text(encoding="utf-8"))
    settings["max_position_embeddings"] = CONTEXT
    (model / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    names = set[tuple[str, str]]()
    for path in (work / "tests").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        names.update(MODEL.findall(text))
        for before, after in REPLACED.items():
            text = text.replace(before, after)
        path.write_text(text, encoding="utf-8")
    for owner, name in names:
        entry = work / "hub" / f"models--{owner}--{name}"
        (entry / "refs").mkdir(parents=True)
        (entry / "refs" / "main").write_text("demo", encoding="utf-8")
        (entry / "snapshots").mkdir()
        (entry / "snapshots" / "demo").symlink_to(model)
    return sorted(f"{owner}/{name}" for owner, name in names)


def run(work: Path, names: Sequence[str], plugin: str, keep: Path, own: Sequence[str]) -> Outcomes:
    """What became of the tests with the ``plugin`` of that name, or with none."""
    environment = {
        **os.environ,
        "VLLM_PLUGINS": plugin,
        "HF_HUB_CACHE": str(work / "hub"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TORCHDYNAMO_DISABLE": "1",  # of many engines none is worth compiling
        "VLLM_USE_AOT_COMPILE": "0",
        "LEXSHARD_NAMES": json.dumps(names),
        "PATH": os.pathsep.join((str(PYTHON.parent), os.environ["PATH"])),
        "PYTHONPATH": os.pathsep.join(
            (*filter(None, [os.environ.get("PYTHONPATH")]), str(Path(__file__).parent))
        ),
    }
    report, log = (keep / f"{plugin or 'without'}.{kind}" for kind in ("xml", "log"))
    command = [str(PYTHON), "-c", PROGRAM, "-p", "vllms_servers", f"--junit-xml={report}"]
    with log.open("w", encoding="utf-8") as said:
        subprocess.run(
            [*command, *own], cwd=work, env=environment, stdout=said, stderr=said, check=False
        )
    found: Outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        what = [each.tag for each in case if each.tag in ("failure", "error", "skipped")]
        key = case.get("classname", "").replace(".", "/"), case.get("name", "")
        found[key] = what[0] if what else "passed"
    return found


def main(folder: Path, keep: Path, own: Sequence[str]) -> int:
    """Prints what became of each file's tests, and those that pass without the plugin alone; 1 if
    there are any."""
    with tempfile.TemporaryDirectory() as made:
        names = make_tests(folder.resolve(), Path(made))
        both = [run(Path(made), names, plugin, keep.resolve(), own) for plugin in ("", "lexshard")]
    for file in sorted({file for each in both for file, _ in each}):
        counts = (Counter(what for (at, _), what in each.items() if at == file) for each in both)
        print(file, *(dict(sorted(each.items())) for each in counts), sep="  ")
    lost = [each for each, what in both[0].items() if both[1].get(each) != what == "passed"]
    for file, name in lost:
        print(f"passes without the plugin alone: {file} {name}: {both[1].get((file, name))}")
    return int(bool(lost))


if __name__ == "__main__":
    given = sys.argv[3:]
    place = given.index("--") if "--" in given else len(given)
    Path(sys.argv[2]).mkdir(parents=True, exist_ok=True)
    arguments = [*(f"tests/{each}" for each in given[:place]), *given[place + 1 :]]
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), arguments))
