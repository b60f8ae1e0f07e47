"""Which URLs are refused; the server dials only public or listed addresses (SECURITY S13, S14; R6)."""

from __future__ import annotations

import asyncio
import random
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network

import pytest

from mm.allow import DENIED_IPV4, DENIED_IPV6, NO_SCHEME, AllowList, LocalFile, Target, decide, follow, is_public
from mm.errors import NOT_ALLOWED, MediaError
from mm.fetch import Fetcher
from mm.limits import MediaLimits

LIMITS = MediaLimits()
ANY = AllowList(())

REFUSED = """
ftp://example.com/a|gopher://example.com/a|ws://example.com/a|javascript:alert(1)|file:///etc/passwd|about:blank
unix:///var/run/x|dict://example.com/|ldap://example.com/|jar:http://example.com!/|blob:http://example.com/1
http:example.com/a|http:/example.com/a|http:///example.com/a|https:///a|//example.com/a|example.com/a|/etc/passwd
http://|https://|http://:80/|http://?a|http://#a|http:// example.com/|http://example.com /
http://user@example.com/|http://user:pass@example.com/|http://@example.com/|http://example.com@127.0.0.1/
http://example.com:80@127.0.0.1/|http://127.0.0.1#@example.com/|http://example.com\\@127.0.0.1/
http:\\\\example.com\\a|http://example.com\\a|http:/\\example.com/a|http://example.com/a\\b
http://exa mple.com/|http://example.com/a b|http://example.com/\ta|http://example.com/a\r\nHost:x
http://example.com/\x00|http://example.com/\x7f|\x01http://example.com/
http://127.0.0.1/|http://127.0.0.1:80/|https://127.0.0.1/|http://127.255.255.254/|http://127.1/|http://127.0.1/
http://2130706433/|http://017700000001/|http://0x7f000001/|http://0x7f.0.0.1/|http://0177.0.0.1/|http://127.0.0.01/
http://127.0.0.1./|http://127.0.0.1.:80/|http://0/|http://0.0.0.0/|http://00.0.0.0/|http://1/|http://256.1.1.1/
http://1.2.3.4.5/|http://1.2.3/|http://a.1/|http://a.0x1/|http://1.1.1.0x1/|http://999999999999/|http://0x/
http://10.0.0.1/|http://172.16.0.1/|http://172.31.255.255/|http://192.168.1.1/|http://169.254.169.254/
http://169.254.169.254/latest/meta-data/|http://100.64.0.1/|http://100.100.100.200/|http://168.63.129.16/
http://192.0.0.192/|http://198.18.0.1/|http://224.0.0.1/|http://239.255.255.250/|http://240.0.0.1/
http://255.255.255.255/|http://[::1]/|http://[::]/|http://[::ffff:127.0.0.1]/|http://[::ffff:7f00:1]/
http://[::127.0.0.1]/|http://[64:ff9b::7f00:1]/|http://[2002:7f00:1::]/|http://[2001::1]/|http://[fe80::1]/
http://[fe80::1%eth0]/|http://[fe80::1%25eth0]/|http://[fc00::1]/|http://[fd00:ec2::254]/|http://[fec0::1]/
http://[ff02::1]/|http://[::ffff:10.0.0.1]/|http://[0:0:0:0:0:0:0:1]/|http://[::1]:443/|http://[::1/|http://::1/
http://[]/|http://[example.com]/|http://[127.0.0.1]/|http://[::1]x/|http://[v1.x]/|http://[::1]:80x/
http://１２７.0.0.1/|http://127。0。0。1/|http://①②⑦.0.0.1/|http://[::ffff:１27.0.0.1]/|http://xn--/|http://\u200b.com/
http://example.com:0/|http://example.com:65536/|http://example.com:-1/|http://example.com:+80/|http://example.com:8x/
http://example.com:22/|http://example.com:8080/|http://example.com:6379/|https://example.com:8443/
http://example.com:٨٠/|http://example.com:80:80/|http://example.com:000080/
http://-example.com/|http://example-.com/|http://exa..mple.com/|http://.example.com/|http://./|http://../
http://exam!ple.com/|http://exam$ple.com/|http://exam%70le.com/|http://example.com%00.evil.com/|http://a,b/
http://exam_ple*.com/|http://<a>/|http://a|b/|http://"a"/|http://a'b/|http://a&b/|http://a=b/|http://a;b/|http://a(b/
http://example.com%2f@127.0.0.1/|http://127.0.0.1%2f@example.com/|http://example.com%40127.0.0.1/|http://%31%32%37.0.0.1/
http://127.0.0.1%00/|http://127.0.0.1%20/|http://127.0.0.1\t/|http://0x7f.1/|http://0177.1/|http://127.0.0.1.1/|http://7f000001.0x1/
http://[::ffff:169.254.169.254]/|http://[::ffff:a9fe:a9fe]/|http://[64:ff9b:1::a00:1]/|http://[2001:db8::1]/|http://[100::1]/
http://[3fff::1]/|http://[5f00::1]/|http://[2620:4f:8000::1]/|http://[fe80:0:0:0:0:0:0:1]/|http://[::ffff:0:10.0.0.1]/
http://192.88.99.1/|http://192.0.2.1/|http://198.51.100.1/|http://203.0.113.1/|http://192.168.0.1:443/|http://127.127.127.127/
data:http://example.com/|view-source:http://example.com/|feed:http://example.com/|http+unix://x/|s3://bucket/key|gs://b/k
""".replace("\n", "|").replace("http://a|b/", "http://a^b/")
REFUSED_URLS = [url for url in REFUSED.split("|") if url] + ["http://example.com/a\r\nHost: x", "http://a\nb/"]
REFUSED_URLS += [
    "http://" + "a" * 64 + ".com/",
    "http://" + ".".join(["abcdefgh"] * 32) + "/",
    "http://a.com/" + "x" * 8192,
]

ACCEPTED = {
    "http://example.com": ("http", "example.com", 80, "/", ""),
    "HTTP://EXAMPLE.COM/A": ("http", "example.com", 80, "/A", ""),
    "https://example.com/a/b.png?x=1&y=2#frag": ("https", "example.com", 443, "/a/b.png", "x=1&y=2"),
    "https://example.com?x": ("https", "example.com", 443, "/", "x"),
    "http://example.com./a": ("http", "example.com", 80, "/a", ""),
    "http://example.com:80/": ("http", "example.com", 80, "/", ""),
    "http://example.com:/": ("http", "example.com", 80, "/", ""),
    "http://example.com:443/": ("http", "example.com", 443, "/", ""),
    "https://a_b.example.com/": ("https", "a_b.example.com", 443, "/", ""),
    "https://3.example.com/": ("https", "3.example.com", 443, "/", ""),
    "https://bücher.example/ä?ö": ("https", "xn--bcher-kva.example", 443, "/%C3%A4", "%C3%B6"),
    "https://EXAMPLE。com/": ("https", "example.com", 443, "/", ""),
    "https://example.com/a%20b%2Fc": ("https", "example.com", 443, "/a%20b%2Fc", ""),
    "https://example.com/@user:1/../x": ("https", "example.com", 443, "/@user:1/../x", ""),
    "https://example.com/?u=http://127.0.0.1/": ("https", "example.com", 443, "/", "u=http://127.0.0.1/"),
    "http://1.1.1.1/": ("http", "1.1.1.1", 80, "/", ""),
    "http://8.8.8.8:443/a": ("http", "8.8.8.8", 443, "/a", ""),
    "http://[2606:4700:4700::1111]/": ("http", "2606:4700:4700::1111", 80, "/", ""),
    "http://[2606:4700:4700:0:0:0:0:1111]:80/": ("http", "2606:4700:4700::1111", 80, "/", ""),
    "http://localhost/": ("http", "localhost", 80, "/", ""),  # a name: the address that it resolves to decides
}


def refused(url: str, limits: MediaLimits = LIMITS) -> MediaError:
    with pytest.raises(MediaError) as caught:
        decide(url, limits, AllowList(limits.allowed_media_domains))
    return caught.value


def test_enough_cases_are_written() -> None:
    assert len(set(REFUSED_URLS)) + len(ACCEPTED) >= 200


@pytest.mark.parametrize("url", REFUSED_URLS)
def test_s13_refused_before_any_io(url: str) -> None:
    error = refused(url)
    assert (error.status, error.reason) == (403, "media_url_not_allowed")
    assert error.message == (NOT_ALLOWED if re.match("[a-zA-Z][a-zA-Z0-9+.-]{0,15}:", url) else NO_SCHEME)


@pytest.mark.parametrize("url", ACCEPTED)
def test_accepted_in_parts(url: str) -> None:
    target = decide(url, LIMITS, ANY)
    assert isinstance(target, Target)
    assert (target.scheme, target.host, target.port, target.path, target.query) == ACCEPTED[url]


@pytest.mark.parametrize("network", [*DENIED_IPV4, *DENIED_IPV6], ids=str)
def test_s14_every_special_range_is_denied_to_its_edges(network) -> None:
    for address in (network[0], network[network.num_addresses // 2], network[-1]):
        assert not is_public(address), address


@pytest.mark.parametrize(
    "text",
    [
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
        "255.255.255.255/32",
        "::/128",
        "::1/128",
        "::/96",
        "::ffff:0:0/96",
        "::ffff:0:0:0/96",
        "64:ff9b::/96",
        "64:ff9b:1::/48",
        "100::/64",
        "2001::/32",
        "2001:2::/48",
        "2001:10::/28",
        "2001:20::/28",
        "2001:db8::/32",
        "2002::/16",
        "3fff::/20",
        "5f00::/16",
        "fc00::/7",
        "fe80::/10",
        "fec0::/10",
        "ff00::/8",
        "4000::/3",
        "8000::/1",
    ],
)
def test_the_registries_special_ranges_are_denied(text: str) -> None:
    network = ip_network(text)
    for address in (network[0], network[network.num_addresses // 3], network[-1]):
        assert not is_public(address), address


def test_ipv4_inside_ipv6_is_denied_in_every_wrapping() -> None:
    for inner in ("127.0.0.1", "10.0.0.1", "169.254.169.254", "8.8.8.8"):
        number = int(IPv4Address(inner))
        for prefix, shift in (("::", 0), ("::ffff:0:0", 0), ("64:ff9b::", 0), ("2002::", 80), ("2001:0::", 0)):
            assert not is_public(IPv6Address(int(IPv6Address(prefix)) | number << shift)), (prefix, inner)


@pytest.mark.parametrize("text", ["1.1.1.1", "8.8.8.8", "93.184.216.34", "172.15.255.255", "172.32.0.0", "11.0.0.0"])
def test_public_addresses_are_dialled(text: str) -> None:
    assert is_public(ip_address(text))


@pytest.mark.parametrize("text", ["2606:4700::1111", "2a00:1450::1", "2001:4860:4860::8888", "2003::1", "2400::1"])
def test_public_ipv6_addresses_are_dialled(text: str) -> None:
    assert is_public(ip_address(text))


def test_s13_listed_names_match_whole_labels() -> None:
    limits = MediaLimits(allowed_media_domains=("example.com", "*.Images.example.org."))
    for url in (
        "http://example.com/",
        "http://EXAMPLE.com./",
        "http://example.com:8080/",
        "http://a.images.example.org/",
    ):
        assert isinstance(decide(url, limits, AllowList(limits.allowed_media_domains)), Target)
    for url in (
        "http://www.example.com/",
        "http://badexample.com/",
        "http://example.com.evil.net/",
        "http://images.example.org/",
        "http://evilimages.example.org/",
        "http://8.8.8.8/",
    ):
        assert refused(url, limits).reason == "media_url_not_allowed"


def test_listed_addresses_may_be_private_and_on_any_port() -> None:
    limits = MediaLimits(allowed_media_domains=("127.0.0.1", "10.1.0.0/16", "fd00::/8"))
    allowed = AllowList(limits.allowed_media_domains)
    for url in ("http://127.0.0.1:9000/", "http://10.1.2.3/", "http://[fd00::5]:81/"):
        assert isinstance(decide(url, limits, allowed), Target)
    for url in ("http://127.0.0.2/", "http://10.2.0.1/", "http://localhost/", "http://example.com/"):
        refused(url, limits)


def test_a_star_allows_public_hosts_in_addition_to_listed_addresses() -> None:
    limits = MediaLimits(allowed_media_domains=("*", "10.1.0.0/16"))
    allowed = AllowList(limits.allowed_media_domains)
    for url in ("http://example.com/", "http://10.1.2.3:8080/"):
        assert isinstance(decide(url, limits, allowed), Target)
    for url in ("http://10.2.0.1/", "http://example.com:8080/"):
        refused(url, limits)


def test_the_operators_own_mistakes_are_named() -> None:
    for entry in ("http://example.com", "exa mple", "a..b", ""):
        with pytest.raises(ValueError, match="allowed_media_domains"):
            AllowList((entry,))


def test_schemes_can_be_narrowed() -> None:
    limits = MediaLimits(media_schemes=("https",))
    refused("http://example.com/", limits)
    assert isinstance(decide("https://example.com/", limits, ANY), Target)


def test_s16_file_urls_need_the_flag_and_plain_components() -> None:
    limits = MediaLimits(allowed_local_media_path="/srv/media")
    assert decide("file:///srv/media/a%20b.png", limits, ANY) == LocalFile((b"srv", b"media", b"a b.png"))
    assert decide("FILE://localhost/srv/media/a", limits, ANY) == LocalFile((b"srv", b"media", b"a"))
    for url in (
        "file://srv/media/a",
        "file:/srv/media/a",
        "file:///srv/media/../a",
        "file:///srv/media/%2e%2e/a",
        "file:///srv/media/%2fetc%2fpasswd",
        "file:///srv/media/a%00.png",
        "file:///srv//media/a",
        "file:///srv/media/",
        "file:///srv/media/a?x",
        "file:///",
    ):
        refused(url, limits)


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("http://other.example/x", "http://other.example/x"),
        ("//other.example/x", "https://other.example/x"),
        ("/x?y", "https://example.com:443/x?y"),
        ("x", "https://example.com:443/a/x"),
        ("../x", "https://example.com:443/a/../x"),
        ("?z", "https://example.com:443/a/b?z"),
        ("file:///etc/passwd", "file:///etc/passwd"),
    ],
)
def test_redirects_are_joined_by_hand(location: str, expected: str) -> None:
    target = decide("https://example.com/a/b?c", LIMITS, ANY)
    assert isinstance(target, Target)
    assert follow(target, location) == expected


class Network:
    """Doubles of resolver and dialler: names resolve to the addresses of the test, and no connection is made."""

    def __init__(self, names: dict[str, list[str]]) -> None:
        self.names = names
        self.looked_up: list[str] = []
        self.dialled: list[int] = []

    async def lookup(self, host: str, port: int) -> list[str]:
        self.looked_up.append(host)
        if host not in self.names:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return self.names[host]

    def dial(self, family: int, kind: int, protocol: int) -> socket.socket:
        self.dialled.append(family)
        raise ConnectionRefusedError


async def tried(network: Network, *urls: str, limits: MediaLimits = LIMITS) -> list[MediaError]:
    """The refusal of each URL; there is always one, because the network's doubles never connect."""
    errors = []
    with ThreadPoolExecutor(1) as pool:
        fetcher = Fetcher(limits, pool, lookup=network.lookup, dial=network.dial)
        for url in urls:
            with pytest.raises(MediaError) as caught:
                await fetcher.fetch(url, "image", lambda size, status: None)
            errors.append(caught.value)
        await fetcher.close()
    assert fetcher.open == 0
    return errors


PRIVATE = [str(network[1 if network.num_addresses > 1 else 0]) for network in (*DENIED_IPV4, *DENIED_IPV6)]
PRIVATE += [
    "::1",
    "::ffff:127.0.0.1",
    "64:ff9b::7f00:1",
    "fe80::1",
    "fe80::1%eth0",
    "fc00::1",
    "ff02::1",
    "fec0::1",
    "::",
]


async def test_s14_names_with_any_special_address_are_never_dialled() -> None:
    names = {f"n{index}.example": [address] for index, address in enumerate(PRIVATE)}
    names |= {f"m{index}.example": ["8.8.8.8", address] for index, address in enumerate(PRIVATE)}
    network = Network(names)
    for error in await tried(network, *(f"http://{name}/a.png" for name in names)):
        assert (error.status, error.reason) == (422, "media_fetch_failed")
    assert network.dialled == []
    assert network.looked_up == list(names)  # each name was resolved once


async def test_public_names_are_dialled_and_failures_read_alike() -> None:
    network = Network({"good.example": ["8.8.8.8"], "both.example": ["1.1.1.1", "2606:4700::1111"], "none.example": []})
    names = ("good.example", "both.example", "none.example", "missing.example")
    texts = {error.message for error in await tried(network, *(f"http://{name}/" for name in names))}
    assert network.dialled == [socket.AF_INET, socket.AF_INET, socket.AF_INET6]
    assert len(texts) == 1


async def test_addresses_in_urls_are_dialled_without_lookup() -> None:
    network = Network({})
    await tried(network, "http://8.8.8.8/", "http://[2606:4700:4700::1111]:443/a?b")
    assert network.looked_up == []
    assert network.dialled == [socket.AF_INET, socket.AF_INET6]


async def test_a_resolver_that_hangs_is_left_behind() -> None:

    class Hanging(Network):
        async def lookup(self, host: str, port: int) -> list[str]:
            await asyncio.sleep(60)
            return []

    (error,) = await tried(Hanging({}), "http://example.com/", limits=MediaLimits(media_dns_timeout=0.05))
    assert error.reason == "media_fetch_failed"


async def test_random_mixtures_never_reach_a_special_address() -> None:
    rng = random.Random(5)
    network = Network({"in.example": ["10.0.0.1"], "xn--bcher-kva.example": ["127.0.0.1"], "localhost": ["127.0.0.1"]})
    schemes = ["http", "https", "HTTP", "ftp", "file", "data", ""]
    users = ["", "", "", "u@", "u:p@", "@", "8.8.8.8@"]
    hosts = ["in.example", "IN.example.", "localhost", "127.0.0.1", "0x7f.1", "[::1]", "[::ffff:8.8.8.8]", "2130706433"]
    hosts += ["bücher.example", "１27.0.0.1", "in.example%00", "10.0.0.1", "[fe80::1%25lo]", "in.example\\", "0"]
    ports = ["", "", ":80", ":443", ":22", ":", ":080", ":x"]
    tails = ["", "/", "/a", "?x", "#y", "/@8.8.8.8", "\\@8.8.8.8", "/\r\nHost: x", "/../.."]
    urls = []
    for _ in range(400):
        separator = rng.choice(["://", "://", "://", ":", ":/", ":///"])
        url = "".join(map(rng.choice, (schemes,))) + separator
        url += rng.choice(users) + rng.choice(hosts) + rng.choice(ports) + rng.choice(tails)
        urls.append(url)
    for url, error in zip(urls, await tried(network, *urls)):
        assert error.reason in ("media_url_not_allowed", "media_fetch_failed"), url
    assert network.dialled == []


def test_the_public_part_of_ipv6_is_one_eighth() -> None:
    rng = random.Random(2)
    for _ in range(2000):
        address = IPv6Address(rng.getrandbits(128))
        assert not is_public(address) or address in IPv6Network("2000::/3")
