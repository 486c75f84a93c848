"""uv.lock, which installs what CI tests."""

import re
import tomllib
from collections import defaultdict
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[1]
BUILDS = {"hatchling"}
"""What builds the package: uv locks what runs."""
PUBLIC = {"pypi.org", "files.pythonhosted.org"}


def test_the_lock_has_the_pinned_versions_from_public_indexes():
    text = (ROOT / "uv.lock").read_text(encoding="utf-8")
    locked = defaultdict[str, set[str]](set)
    for package in tomllib.loads(text)["package"]:
        locked[package["name"]].add(package.get("version", ""))
    pinned = re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(pinned) > 30
    wrong = [f"{name}=={version}" for name, version in pinned if locked[name.lower().replace("_", "-")] != {version}]
    assert [each for each in wrong if each.partition("==")[0] not in BUILDS] == [], "make lock"
    assert {urlsplit(url).hostname for url in re.findall(r'https?://[^"]*', text)} == PUBLIC


def test_the_lock_has_every_dependency_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    packages = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))["package"]
    [own] = [package for package in packages if package["name"] == "phalanx"]
    stated = own["metadata"]["requires-dist"]
    asked = [*project["dependencies"], *(each for extra in project["optional-dependencies"].values() for each in extra)]
    names = {re.split(r"[^\w-]", each)[0].lower().replace("_", "-") for each in asked} - {"phalanx"}
    assert names <= {each["name"] for each in stated} | {"phalanx"}, "make lock"
    [bound] = [each["specifier"] for each in stated if each["name"] == "torch"]
    assert f"torch{bound}" in asked, "make lock"
