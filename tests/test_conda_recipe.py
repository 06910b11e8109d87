"""The recipe for conda needs what the package needs."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]


def test_the_recipe_has_the_dependencies_and_the_command_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    recipe = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text(encoding="utf-8"))
    needed = {re.sub(r"(?<=[a-z])(?=>)", " ", name) for name in project["project"]["dependencies"]}
    assert set(recipe["requirements"]["run"]) == {"python >=3.11", *needed}
    build = {re.sub(r"(?<=[a-z])(?=>)", " ", name) for name in project["build-system"]["requires"]}
    assert build <= set(recipe["requirements"]["host"])
    (command,) = recipe["build"]["python"]["entry_points"]
    assert command == f"forerun = {project['project']['scripts']['forerun']}"
    assert recipe["about"]["license"] == project["project"]["license"]
