"""kube-proxy completion: prints the script with which a shell completes kube-proxy's command lines.

SHELL is bash, zsh or fish. An installation puts these scripts into the shells' folders.
To load a script into the present shell only:

  . <(kube-proxy completion bash)
  kube-proxy completion fish | source

When the user presses Tab, the scripts pass the typed part of the command line as LINE, and the command prints the
possible continuations. Names of Services come from the running proxy, if it answers."""

# shtab is not used, because its scripts are static. The completion of the running proxy's Services, of values after =,
# and of parts before : would still need a function in each shell's language.

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from textwrap import shorten
from typing import Final

from kubeproxy.commands import COMMANDS, YES
from kubeproxy.commands.parsers import PROXY, parser_of, summary, values
from kubeproxy.config.flags import BY_NAME
from kubeproxy.control.listener import connect

TIMEOUT = 1.0  # seconds to wait for a proxy
_NAME = re.compile(r"[\w.-]+/[\w.-]+(:\w+(/(udp|sctp))?)?", re.ASCII)
"""Matches a name of a Service without characters that have a special meaning in a shell."""
_PATHS = {"FILE": ":file", "PATH": ":file", "FOLDER": ":folder"}
"""The answers that make the script propose files or folders, by the metavar of the option."""

_BASH = """\
# Completion of kube-proxy for bash, made by: kube-proxy completion bash

_kube_proxy() {
    # Cut only at blanks: readline also cuts at = and :, which options and names contain, and replaces only the text
    # after them.
    local line=${COMP_LINE:0:COMP_POINT} found=()
    local whole=${line##*[[:space:]]}
    local cut=${whole%"${whole##*[=:]}"}
    mapfile -t found < <(kube-proxy completion bash "$line" 2>/dev/null)
    case ${found[0]} in
    :file) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- "${whole#--*=}") ;;
    :folder) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- "${whole#--*=}") ;;
    *)
        [[ ${found[0]} != *: ]] || compopt -o nospace
        found=("${found[@]%%$'\\t'*}")
        [[ $cut != *= || $COMP_WORDBREAKS == *=* ]] || cut=''
        [[ $cut != *: || $COMP_WORDBREAKS == *:* ]] || cut=''
        COMPREPLY=("${found[@]#"$cut"}")
        ;;
    esac
}

complete -F _kube_proxy kube-proxy
"""
_ZSH = """\
#compdef kube-proxy
# Completion of kube-proxy for zsh, made by: kube-proxy completion zsh

_kube_proxy() {
    local line="${(j: :)words[1,CURRENT-1]} $PREFIX"
    local -a found shown
    found=(${(f)"$(_call_program words kube-proxy completion zsh ${(q)line} 2>/dev/null)"})
    case $found[1] in
    :file) compset -P '--*='; _files ;;
    :folder) compset -P '--*='; _files -/ ;;
    *)
        shown=("${(@)found/$'\\t'/  -- }")
        found=("${(@)found%%$'\\t'*}")
        if [[ $found[1] == *: ]]; then compadd -S '' -a found; else compadd -l -d shown -a found; fi
        ;;
    esac
}

if [[ $funcstack[1] == _kube[-_]proxy ]]; then _kube_proxy "$@"; else compdef _kube_proxy kube-proxy; fi
"""
_FISH = """\
# Completion of kube-proxy for fish, made by: kube-proxy completion fish

function __kube_proxy
    set -l found (kube-proxy completion fish (commandline -cp | string collect) 2>/dev/null)
    set -l option (string match -r -- '^--[^=]*=' (commandline -ct))
    set -l path (string replace -r -- '^--[^=]*=' '' (commandline -ct))
    switch "$found[1]"
        case :file
            printf "$option%s\\n" (__fish_complete_path "$path")
        case :folder
            printf "$option%s\\n" (__fish_complete_directories "$path" '')
        case '*'
            printf '%s\\n' $found
    end
end

complete -c kube-proxy -f -a '(__kube_proxy)'
"""
SCRIPTS: Final = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=tuple(SCRIPTS), help="bash, zsh or fish")
    parser.add_argument("line", metavar="LINE", nargs="?", help="for the scripts: print the possible continuations")


def run(given: argparse.Namespace) -> int:
    if given.line is None:
        sys.stdout.write(SCRIPTS[given.shell])
    else:
        sys.stdout.writelines(f"{one}\n" for one in following(given.line))
    return YES


def following(line: str) -> list[str]:
    """Return the continuations of a line: words, some followed by a tab and a description; or, if files can follow, an
    answer of _PATHS."""
    *before, last = [*line.split()[1:], *([""] if line[-1:].isspace() else [])] or [""]
    name = before.pop(0) if before and before[0] in COMMANDS else PROXY
    if not before and name == PROXY and not last.startswith("-"):
        return _beginning(last, COMMANDS.items())
    parser = parser_of(name)
    options = parser._option_string_actions
    pending, positional = arguments_at(parser, before)
    if pending is not None:
        return list(_proposed(pending, last))
    start, equals, value = last.partition("=")
    if equals and start in options:
        return [one if one.startswith(":") else f"{start}={one}" for one in _proposed(options[start], value)]
    if last.startswith("-"):
        long = {max(one.option_strings, key=len): summary(one) for one in options.values()}
        return _beginning(last, long.items())
    return list(_proposed(positional, last)) if positional is not None else []


def arguments_at(
    parser: argparse.ArgumentParser, before: Iterable[str]
) -> tuple[argparse.Action | None, argparse.Action | None]:
    """Return the option that still needs its value after these words, and the next positional argument; each may be
    None."""
    pending, place = None, 0
    for word in before:
        if pending is None and not word.startswith("-"):
            place += 1
        option = parser._option_string_actions.get(word) if pending is None else None
        pending = option if option is not None and option.nargs != 0 else None
    return pending, next(iter(parser._get_positional_actions()[place:]), None)


def _beginning(prefix: str, words: Iterable[tuple[str, str]]) -> list[str]:
    return [f"{word}\t{_first_sentence(text)}" for word, text in words if word.startswith(prefix)]


def _first_sentence(text: str) -> str:
    return shorten(text.partition(". ")[0].rstrip("."), 90, placeholder="…")


def _proposed(action: argparse.Action, prefix: str) -> Iterator[str]:
    name = action.metavar
    if name in _PATHS:
        yield _PATHS[name]
    elif name == "TARGET" or (name == "NAME" and not action.option_strings):
        end = ":" if name == "TARGET" and ":" not in prefix else ""
        yield from (f"{one}{end}" for one in names(prefix, BY_NAME["control-socket"].default))
    else:
        yield from (word for word in values(action) if word.startswith(prefix))


def names(prefix: str, path: str) -> list[str]:
    """Return the proxy's Services with names that begin with `prefix`, or ports as NAMESPACE/NAME:80 if `prefix`
    contains a colon; [] without a proxy."""
    from urllib.parse import quote  # noqa: PLC0415

    try:
        with connect(path, TIMEOUT) as sock:
            sock.sendall(
                f"GET /names?prefix={quote(prefix)} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
            )
            with sock.makefile("rb") as answer:
                head, _, body = answer.read().partition(b"\r\n\r\n")
    except OSError:
        return []
    if not head.startswith(b"HTTP/1.1 200 "):
        return []
    return [line for line in body.decode(errors="replace").splitlines() if _NAME.fullmatch(line)]
