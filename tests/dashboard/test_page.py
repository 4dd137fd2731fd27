"""What is served under /dashboard, without a browser: files, headers, keys, and the build."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from caudal.config import ServerConfig
from caudal.server.routes import dashboard
from tests.server.harness import Setup, in_process

ROOT = Path(__file__).resolve().parents[2]
KEY = "a key of some length"

needs_bundle = pytest.mark.skipif(
    not (dashboard.BUNDLE / "index.html").exists(), reason="no bundle (make dashboard)"
)


@needs_bundle
async def test_page_and_its_files_load_without_a_key_and_hold_no_data() -> None:
    async with in_process(Setup(config=ServerConfig(port=0, api_keys=(KEY,)))) as served:
        page = await served.http.get("/dashboard")
        assert page.status_code == 200
        assert served.state.require_model().name not in page.text
        assert page.headers["cache-control"] == "no-cache"
        names = re.findall(r"dashboard/([\w.-]+)", page.text)
        assert sorted(name.rpartition(".")[2] for name in names) == ["css", "js"]
        for name in names:
            file = await served.http.get(f"/dashboard/{name}")
            assert file.status_code == 200
            assert "immutable" in file.headers["cache-control"]
        assert (await served.http.get("/caudal/live")).status_code == 401


@needs_bundle
async def test_policy_forbids_foreign_sources_and_evaluated_text() -> None:
    async with in_process() as served:
        headers = (await served.http.get("/dashboard")).headers
        policy = headers["content-security-policy"]
        assert "unsafe" not in policy
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"


@needs_bundle
def test_bundle_names_no_other_host_but_in_its_licence() -> None:
    for path in dashboard.BUNDLE.iterdir():
        text = re.sub(r"^/\*!.*?\*/", "", path.read_text("utf-8"), flags=re.DOTALL)
        foreign = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text))
        assert foreign <= {"http://www.w3.org"}, path.name
        assert "eval(" not in text
    assert "MIT" in next(dashboard.BUNDLE.glob("app-*.js")).read_text("utf-8")[:2000]


async def test_plain_page_stands_in_where_there_is_no_bundle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(dashboard, "BUNDLE", tmp_path / "absent")
    async with in_process() as served:
        page = await served.http.get("/dashboard")
        assert page.status_code == 200
        assert "Node.js" in page.text
        for name in re.findall(r"dashboard/([\w.-]+)", page.text):
            file = await served.http.get(f"/dashboard/{name}")
            assert file.status_code == 200
            assert file.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize(
    "name",
    [
        *("app-0.js", "index.html", "..%2f..%2fapp.py", "..%5capp.py", "%2e%2e", "plain.js%00"),
        *("plain", ".js", "PLAIN.JS", "x" * 5000 + ".js"),
    ],
)
async def test_only_the_files_of_the_page_can_be_had(name: str) -> None:
    async with in_process() as served:
        response = await served.http.get(f"/dashboard/{name}")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "not_found"


async def test_a_slash_too_many_leads_to_the_page() -> None:
    async with in_process() as served:
        response = await served.http.get("/dashboard/")
        assert (response.status_code, response.headers["location"]) == (308, "../dashboard")


def test_lock_file_names_every_version_and_no_registry() -> None:
    lock = json.loads((ROOT / "dashboard" / "package-lock.json").read_text("utf-8"))
    packages = {name: package for name, package in lock["packages"].items() if name}
    assert packages
    for name, package in packages.items():
        assert package["version"], name
        assert package["integrity"].startswith("sha512-"), name
        assert "resolved" not in package, name


def test_installed_package_contains_the_bundle_that_git_ignores() -> None:
    folder = "src/caudal/server/static"
    assert f"{folder}/" in (ROOT / ".gitignore").read_text("utf-8").splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert folder in project["tool"]["scikit-build"]["sdist"]["include"]
