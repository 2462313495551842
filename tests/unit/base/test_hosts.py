"""Caches in front of hosts: hosts.toml, and the options that name caches."""

import json
from pathlib import Path

import pytest

from btrfs_ublk.base.hosts import Rule, find_rule, read_hosts, via_option
from btrfs_ublk.errors import UsageError
from btrfs_ublk.volume.definition import VolumeDefinition, parse_definition


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BTRFS_UBLK_CONFIG_DIR", str(tmp_path))
    return tmp_path / "hosts.toml"


GOOD = """
[[via]]
for = "registry.example.org"
caches = ["https://cache1.example.org", "https://cache2.example.org:8443"]

[[via]]
for = "*.example.org:5000"
caches = ["http://10.0.0.1:3128"]
plain = true
"""


def test_rules_of_this_machine(hosts: Path) -> None:
    assert via_option() == []
    hosts.write_text(GOOD)
    rules = read_hosts()
    assert find_rule(rules, "registry.example.org") == rules[0]
    assert find_rule(rules, "registry.example.org:443") == rules[0]
    assert find_rule(rules, "s3.example.org:5000") == Rule(
        "*.example.org:5000", ("http://10.0.0.1:3128",), True
    )
    assert find_rule(rules, "s3.example.org") is None
    option, text = via_option()
    assert option == "--via"
    assert json.loads(text) == [rule.to_dict() for rule in rules]


BAD_FILES = {
    "x = 1": "key 'x' is unknown",
    "[[via]": "not valid TOML",
    "via = 3": "no list of tables",
    "[[via]]\nfor = 3": "for is 3, not a host",
    '[[via]]\nfor = "a"': "caches is None, not a list",
    '[[via]]\nfor = "a"\ncaches = ["cache:3128"]': "no http or https URL",
    '[[via]]\nfor = "a"\ncaches = ["http://c/p"]': "more than scheme, host and port",
    '[[via]]\nfor = "a"\ncaches = ["http://me:secret-word@c"]': "more than scheme",
    '[[via]]\nfor = "a"\ncaches = ["http://c:99999"]': "is no URL",
    '[[via]]\nfor = "a"\ncaches = ["http://c"]\nplain = 1': "not true or false",
    '[[via]]\nfor = "a"\ncaches = ["http://c"]\nx = 1': "key 'x' of via is unknown",
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_a_file_that_is_wrong_says_where(hosts: Path, text: str) -> None:
    hosts.write_text(text)
    with pytest.raises(UsageError) as caught:
        via_option()
    assert BAD_FILES[text] in str(caught.value)
    assert str(hosts) in str(caught.value)
    assert "secret-word" not in str(caught.value)
    # A device must not be lost for it.
    assert via_option(strict=False) == []


def test_a_file_of_others_is_refused(hosts: Path) -> None:
    hosts.write_text(GOOD)
    hosts.chmod(0o666)
    with pytest.raises(UsageError, match="can be changed by others"):
        read_hosts()


def test_a_volume_names_caches() -> None:
    urls = ("http://c1:3128", "http://c2:3128")
    definition = VolumeDefinition(via=urls, via_plain=True)
    assert parse_definition(definition.to_toml(), where="it") == definition
    with pytest.raises(UsageError, match="tokens would go to http://c1:3128"):
        VolumeDefinition(image="registry.example.org/a:b", via=urls)
    with pytest.raises(UsageError, match="more than scheme, host and port"):
        parse_definition('via = ["http://c/path"]', where="it")
    with pytest.raises(UsageError, match="not a list of URLs"):
        parse_definition('via = "http://c"', where="it")
