"""Options that a host may have, and messages."""

import argparse

import pytest

from mindspeed_lowp.features.base import Feature
from mindspeed_lowp.features.command_line import (
    add_choices,
    add_option,
    find_option,
    nearest,
    stop,
    tell_nearest_flags,
    typed,
)


def test_option_of_the_host_is_extended():
    parser = argparse.ArgumentParser()
    group = parser.add_argument_group("host")
    group.add_argument("--scheme", choices=("a", "b"), default="a")
    add_option(parser, "ours", "--scheme", choices=["b", "c"], default="c")
    assert find_option(parser, "--scheme").choices == ["a", "b", "c"]
    assert parser.parse_args(["--scheme", "c"]).scheme == "c"
    assert parser.parse_args([]).scheme == "a"  # the host's default


def test_option_is_added_where_the_host_has_none_and_extended_the_second_time():
    parser = argparse.ArgumentParser()
    add_option(parser, "ours", "--scheme", choices=["b"])
    add_option(parser, "ours", "--scheme", choices=["c"])
    assert find_option(parser, "--scheme").choices == ["b", "c"]
    assert [group.title for group in parser._action_groups].count("ours") == 1


def test_option_without_choices_stays_without():
    parser = argparse.ArgumentParser()
    parser.add_argument("--scheme")
    add_choices(parser, "--scheme", "c")
    assert find_option(parser, "--scheme").choices is None


def test_unknown_option_gets_no_choices():
    parser = argparse.ArgumentParser()
    add_choices(parser, "--scheme", "c")
    assert find_option(parser, "--scheme") is None


def test_typed_gives_the_flag_as_written(monkeypatch):
    monkeypatch.setattr("sys.argv", ["--script", "--a=1", "--b", "--c"])
    assert typed("--b", "--a") == "--a"
    assert typed("--script", "--ab") is None


def test_nearest_puts_the_closest_first():
    assert nearest("mxpf8", ["delayed", "mxfp4", "mxfp8"], count=1) == ["mxfp8"]


def test_stop_says_error_and_exits_with_one():
    with pytest.raises(SystemExit, match=r"^error: no such thing$") as info:
        stop("no such thing")
    assert info.value.code != 0


def test_checks_between_features_name_the_flags():
    feature = Feature("use-this")
    both = argparse.Namespace(use_this=True, use_that=True)
    only_this = argparse.Namespace(use_this=True)
    feature.incompatible_check(only_this, "use_that")
    feature.dependency_check(both, "use_that")
    with pytest.raises(SystemExit, match="--use-this and --use-that cannot be used together"):
        feature.incompatible_check(both, "use_that")
    with pytest.raises(SystemExit, match="--use-this needs --use-that"):
        feature.dependency_check(only_this, "use_that")


def test_feature_applies_by_name_or_always():
    assert Feature(" Use-This ").feature_name == "use_this"
    assert Feature("use-this").is_need_apply(argparse.Namespace(use_this=1))
    assert not Feature("use-this").is_need_apply(argparse.Namespace())
    assert Feature("use-this", optimization_level=0).is_need_apply(argparse.Namespace())


@pytest.fixture
def parser():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--fp8-recipe")
    parser.add_argument("--seed", type=int)
    tell_nearest_flags(parser)
    return parser


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--fp8-recip mxfp8", "error: --fp8-recip: no such flag; the nearest: --fp8-recipe"),
        ("--fp8-recip=mxfp8 x", "error: --fp8-recip: no such flag; the nearest: --fp8-recipe"),
        ("--qqqqqqqqq --sed 1", "error: --qqqqqqqqq: no such flag; --sed: no such flag; the nearest: --seed"),
    ],
)
def test_unknown_flags_are_told_the_nearest(parser, words, message):
    with pytest.raises(SystemExit) as info:
        parser.parse_args(words.split())
    assert info.value.code.startswith(message)


@pytest.mark.parametrize("words", ["--seed x", "positional", "--seed"])
def test_other_mistakes_are_told_by_argparse(parser, words, capsys):
    with pytest.raises(SystemExit) as info:
        parser.parse_args(words.split())
    assert info.value.code == 2 and "usage:" in capsys.readouterr().err
