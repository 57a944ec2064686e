"""The command `offbyone`; tests/runs/test_my_lab.py runs it from a wheel."""

import sys

import pytest

from lab.cli import console
from lab.cli.launch import add_conf_folder, command_of
from rl.config.shipped import SHIPPED


def call(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/offbyone", *arguments])
    console.main()


def test_all_commands_are_listed_and_an_unknown_one_is_refused(monkeypatch, capsys):
    call(monkeypatch)
    listed = capsys.readouterr().out
    names = (*console.ENTRY_POINTS, *console.FUNCTIONS, "new")
    assert all(f"offbyone {name}" in listed for name in names)
    assert all((SHIPPED / f"{n.replace('-', '_')}.py").exists() for n in console.ENTRY_POINTS)
    call(monkeypatch, "--version")
    assert capsys.readouterr().out[0].isdigit()
    with pytest.raises(SystemExit, match="offbyone has no command trian"):
        call(monkeypatch, "trian")


@pytest.mark.parametrize("command", ["report", "view", "compare-losses"])
def test_a_command_ends_with_the_status_of_its_program(command, monkeypatch):
    with pytest.raises(SystemExit) as end:
        call(monkeypatch, command, "nowhere")
    assert end.value.code == 2


def test_a_new_folder_gives_its_name_to_the_package_its_files_and_text(tmp_path, monkeypatch):
    said = console.copy_my_lab([str(tmp_path / "my-idea")])
    assert "offbyone train loss=my_idea" in said
    assert (tmp_path / "my-idea" / "my_idea" / "focal.py").is_file()
    assert (tmp_path / "my-idea" / "conf" / "loss" / "my_idea.yaml").is_file()
    texts = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(texts) > 20
    assert not any("my_lab" in text for text in texts)
    (tmp_path / "Other-Idea").mkdir()
    monkeypatch.chdir(tmp_path / "Other-Idea")
    assert "created . with the package other_idea" in console.copy_my_lab(["."])
    assert (tmp_path / "Other-Idea" / "other_idea" / "focal.py").is_file()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("losses", "losses is already a loss, a module or a folder of a lab: choose another"),
        ("json", "json is already a loss, a module"),
        ("grpo", "grpo is already a loss"),
        ("focal", "focal is already a loss"),
        ("tests", "tests is already a loss"),
        ("class", "class cannot be the name of a Python package"),
        ("full", "full is a file or is not empty: choose another folder"),
        ("3d", "3d cannot be the name"),
        ("", "is a file or is not empty: choose another folder"),
    ],
)
def test_a_folder_that_cannot_be_made_is_refused(tmp_path, name, why):
    (tmp_path / "full").touch()
    with pytest.raises(SystemExit, match=why):
        console.copy_my_lab([str(tmp_path / name)])
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_a_folder_that_hides_one_of_our_packages_is_named(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "losses", raising=False)
    (tmp_path / "losses").mkdir()
    (tmp_path / "losses" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SystemExit, match=f"{tmp_path}/losses hides the package losses of offbyone"):
        console.exit_if_package_is_hidden()
    sys.modules.pop("losses", None)


def test_the_folder_conf_of_the_current_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert add_conf_folder(["loss=mine"]) == ["loss=mine"]
    (tmp_path / "conf").mkdir()
    assert add_conf_folder(["loss=mine"]) == ["--config-dir", "conf", "loss=mine"]
    assert add_conf_folder(["--config-dir", "conf", "a=1"]) == ["--config-dir", "conf", "a=1"]
    sweeps = str(SHIPPED / "sweeps")
    searched = f"hydra.searchpath=[file://{tmp_path.resolve()}/conf]"
    assert add_conf_folder(["--config-dir", "sweeps"]) == ["--config-dir", sweeps, searched]
    assert add_conf_folder(["--config-dir=sweeps"]) == [f"--config-dir={sweeps}", searched]
    assert add_conf_folder(["-cd=sweeps"]) == [f"-cd={sweeps}", searched]
    own = ["--config-dir", "mine", "hydra.searchpath=[file:///x]"]
    assert add_conf_folder(own) == own
    monkeypatch.chdir(SHIPPED)
    assert add_conf_folder(["loss=mine"]) == ["loss=mine"]


def test_the_printed_command_names_offbyone():
    typed = ["/bin/python", "/bin/offbyone", "train", "--config-dir", "conf", "loss=mine"]
    arguments = [str(SHIPPED / "train.py"), "--config-dir", "conf", "loss=mine"]
    assert command_of(typed, arguments, []) == ["offbyone", "train", "--config-dir", "conf"]
