"""Files that users copy: extras of the image exist, and the service account has its rights."""

import re
import tomllib

import yaml
from places import ROOT


def test_the_image_installs_extras_that_exist():
    lines = (ROOT / "deploy" / "Dockerfile").read_text()
    match = re.search(r'"\.\[\$\{EXTRA\},([a-z,]+)\]"', lines)
    assert match is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {*match[1].split(","), *re.findall(r"EXTRA=(\w+)", lines), "tpu"}
    assert named <= project["optional-dependencies"].keys()


def test_service_account_has_the_rights_of_jax():
    text = (ROOT / "deploy" / "service-account.yaml").read_text()
    account, role, binding = yaml.safe_load_all(text)
    rights = {name: rule["verbs"] for rule in role["rules"] for name in rule["resources"]}
    assert rights == {"pods": ["get", "list"], "services": ["get", "list"], "jobs": ["get"]}
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account["metadata"]["name"]}]
