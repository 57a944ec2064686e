"""Write the hashes of both locks, or compare them with the registry's.

    python -m tests.support.lock_hashes            rewrites each entry: name==version --hash=...
    python -m tests.support.lock_hashes --check    fails if an entry differs (make lock-check)

An entry has the hashes of the files that Linux x86-64 with glibc 2.31 can install (llguidance
supports no older one): one wheel per Python, or the source if there is no wheel.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

REPO = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13")
FROM_SOURCE = ("deepspeed", "antlr4-python3-runtime")
ENTRY = re.compile(r"^([\w.-]+)==(\S+).*$", re.MULTILINE)
# PyTorch's own index has these wheels, the registry does not. Where pip sees one, it prefers it.
TORCH_ON_CPU = {
    "2.13.0": (
        "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
        "4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2",
        "3fbf9c9d1f3c10c2d59d04aca426dee9ccc6ceb32d255c61e93acc3b4f75fae6",
    )
}


def files(lock: Path, python: str, folder: Path) -> dict[str, list[str]]:
    """Return the sha256 of each package's files that this Python can install."""
    output, pins = folder / "pylock.toml", folder / "pins.txt"
    pins.write_text("\n".join(f"{name}=={pin}" for name, pin in ENTRY.findall(lock.read_text())))
    command = [str(Path(sys.executable).with_name("uv")), "pip", "compile", str(pins), "--quiet"]
    command += ["--no-deps", "--format", "pylock.toml", "--output-file", str(output)]
    command += ["--python-version", python, "--python-platform", "x86_64-manylinux_2_31"]
    command += ["--only-binary", ":all:", *(a for n in FROM_SOURCE for a in ("--no-binary", n))]
    subprocess.run([*command, "--no-python-downloads"], check=True)
    packages = tomllib.loads(output.read_text())["packages"]
    return {
        package["name"]: [
            file["hashes"]["sha256"] for file in package.get("wheels") or [package["sdist"]]
        ]
        for package in packages
    }


def with_hashes(lock: Path) -> str:
    """Return the text of the lock with the registry's hashes."""
    hashes: dict[str, set[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for python in PYTHONS:
            for name, found in files(lock, python, Path(folder)).items():
                hashes.setdefault(name, set()).update(found)

    def entry(match: re.Match[str]) -> str:
        name, pin = match[1], match[2]
        on_cpu = name == "torch" and "cpu" in lock.name
        known = hashes[name].union(TORCH_ON_CPU[pin] if on_cpu else ())
        return f"{name}=={pin} " + " ".join(f"--hash=sha256:{one}" for one in sorted(known))

    return ENTRY.sub(entry, lock.read_text())


def main() -> int:
    """Write or check both locks; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check, differ = parser.parse_args().check, False
    for lock in sorted(REPO.glob("requirements-*.lock")):
        text = with_hashes(lock)
        if not check:
            lock.write_text(text)
        elif different := set(text.splitlines()) ^ set(lock.read_text().splitlines()):
            names, differ = sorted({line.split("==")[0] for line in different}), True
            told = f"the hashes of {', '.join(names)} differ from the registry's"
            print(f"{lock.name}: {told}")  # noqa: T201
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
