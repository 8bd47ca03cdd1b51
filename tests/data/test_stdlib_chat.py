import json
import math
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from dflash.data.conversations import JsonlFiles
from dflash.data.stdlib_chat import SHORT_TEMPLATES, StdlibChat, make_prompts, read_functions


@pytest.fixture(scope="module")
def prompts() -> list[dict]:
    return make_prompts(10_000, seed=3)


@pytest.fixture
def small_library(tmp_path: Path) -> Path:
    """Two modules with an alias, a setter, private and nested functions; test packages; a file that does not parse."""
    (tmp_path / "alpha.py").write_text(
        '''
def area(width, height=1):
    """Width times height."""
    return width * height

def _hidden(x):
    return x

class Box:
    @property
    def size(self):
        def inner():
            return 1
        return self._size + inner()

    @size.setter
    def size(self, value):
        self._size = value

class _Private:
    def method(self):
        return 2

if True:
    async def wait(seconds):
        await seconds
'''
    )
    (tmp_path / "beta.py").write_text(
        '''
class Shape:
        def surface(self_is_not_an_argument_here):
            return 3

def copied_area(width, height=1):
    """Width times height."""
    return width * height
'''
    )
    (tmp_path / "broken.py").write_text("def (:\n")
    for folder in ("test", "idlelib", "__phello__", "site-packages"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "gamma.py").write_text("def never():\n    return 4\n")
    return tmp_path


def test_the_same_seed_gives_the_same_prompts_in_another_process(prompts: list[dict]) -> None:
    """Another hash seed there: an order taken from a set would show."""
    program = (
        "import json; from dflash.data.stdlib_chat import make_prompts; print(json.dumps(make_prompts(10_000, seed=3)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": "1"}, capture_output=True, check=True
    )
    assert json.loads(result.stdout) == prompts


def test_another_seed_asks_other_questions(prompts: list[dict]) -> None:
    other = {p["messages"][0]["content"] for p in make_prompts(200, seed=4)}
    assert len(other & {p["messages"][0]["content"] for p in prompts[:200]}) < 20


@pytest.mark.parametrize("num_prompts", [1, 7, 2000])
def test_fewer_prompts_are_a_prefix_of_more(prompts: list[dict], num_prompts: int) -> None:
    assert make_prompts(num_prompts, seed=3) == prompts[:num_prompts]


def test_ten_thousand_prompts_are_all_different(prompts: list[dict]) -> None:
    assert len({p["messages"][0]["content"] for p in prompts}) == 10_000


def test_the_standard_library_has_five_thousand_functions(prompts: list[dict]) -> None:
    assert len({p["group"] for p in prompts}) >= 5_000


@pytest.mark.parametrize("long_fraction", [0.0, 0.2, 0.5, 1.0])
def test_the_share_of_prompts_with_source_is_the_one_asked_for(long_fraction: float) -> None:
    contents = [p["messages"][0]["content"] for p in make_prompts(500, long_fraction=long_fraction)]
    assert sum("```python" in content for content in contents) == 500 * long_fraction


def test_sources_spread_over_all_lengths_and_stay_below_the_limit() -> None:
    """Each octave from 256 to 4096 characters has a fair share; a plain draw would leave the long ones nearly empty."""
    contents = [p["messages"][0]["content"] for p in make_prompts(300, long_fraction=1.0, max_code_chars=5000)]
    octaves = [math.floor(math.log2(len(content))) for content in contents]
    assert max(map(len, contents)) < 5000 + 200
    assert min(octaves.count(octave) for octave in (8, 9, 10, 11)) >= 300 // 10


def test_every_prompt_names_a_place_in_the_library(prompts: list[dict]) -> None:
    for prompt in prompts[:50]:
        file, line = prompt["source"].rsplit(":", 1)
        lines = Path(sysconfig.get_path("stdlib"), file).read_text(encoding="utf-8").splitlines()
        assert f"def {prompt['group'].rsplit('.', 1)[1]}" in lines[int(line) - 1]


def test_public_functions_are_found_once_under_their_first_name(small_library: Path) -> None:
    """alpha.area and beta.copied_area are one function; private, nested, test and unparsable ones are none."""
    assert [f.name for f in read_functions(small_library)] == [
        "alpha.area", "alpha.Box.size", "alpha.wait", "beta.Shape.surface",
    ]  # fmt: skip


def test_the_signature_and_the_dedented_source_are_as_written(small_library: Path) -> None:
    area, size, _, surface = read_functions(small_library)
    assert area.signature == "alpha.area(width, height=1)"
    assert size.code.splitlines()[:2] == ["@property", "def size(self):"]
    assert surface.code == "def surface(self_is_not_an_argument_here):\n    return 3"


def test_more_prompts_than_exist_is_an_error_that_names_the_option(small_library: Path) -> None:
    num_possible = 4 * len(SHORT_TEMPLATES)
    assert len(make_prompts(num_possible, long_fraction=0.0, stdlib_folder=small_library)) == num_possible
    with pytest.raises(ValueError, match=rf"data\.max_samples={num_possible + 1}.* gives {num_possible}\."):
        make_prompts(num_possible + 1, long_fraction=0.0, stdlib_folder=small_library)


def test_a_python_without_sources_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no Python source in"):
        make_prompts(1, stdlib_folder=tmp_path)


@pytest.mark.parametrize(
    ("key", "value"), [("max_samples", None), ("max_samples", 0), ("long_fraction", 1.5), ("max_code_chars", 3)]
)
def test_a_wrong_option_is_an_error_that_names_it(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"data\.{key}="):
        StdlibChat(**{"max_samples": 10, key: value})


def test_the_answered_data_keep_the_options_of_the_prompts(tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_text(json.dumps({"messages": []}) + "\n")
    data = StdlibChat(max_samples=10, max_length_tokens=77, over_length="drop").answered(answers)
    assert data == JsonlFiles(path=str(answers), max_samples=10, max_length_tokens=77, over_length="drop")
