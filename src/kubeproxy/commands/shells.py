"""The scripts that make bash, zsh and fish complete this command line. All of a script but Services is fixed."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Final

from kubeproxy.commands.grammar import Grammar, Kind, Option, Position, Value, commands, proxy

_LONGEST = 90
"""Characters of what a shell shows beside an option."""


def _short(text: str) -> str:
    """Return the first sentence of a text, or as much of it as a shell shows."""
    first = text.partition(". ")[0].rstrip(".")
    return first if len(first) <= _LONGEST else first[: _LONGEST - 1].rsplit(" ", 1)[0] + "…"


def _word(grammar: Grammar) -> str:
    """Return what stands on the command line for a command; '' for the proxy itself."""
    return grammar.name.partition(" ")[2]


def _all() -> list[Grammar]:
    return [*commands(), proxy()]


# --- bash

_BASH = """\
# Completion of kube-proxy for bash, made by: kube-proxy completion bash

_kube_proxy() {
    local line=${COMP_LINE:0:COMP_POINT} command='' cur prev='' kind='' options='' takes='' positions=() found=()
    # What was typed, cut at blanks alone: readline cuts at = and : as well, which names and options have.
    local typed=() word at
    read -ra typed <<<"$line"
    cur=${line##*[[:space:]]}
    [[ -z $cur ]] || unset 'typed[${#typed[@]}-1]'
    [[ ${#typed[@]} -lt 2 ]] || command=${typed[1]}
    case $command in
@COMMANDS@
    esac
    prev=${typed[${#typed[@]}-1]}
    if [[ $cur == --*=* ]]; then
        prev=${cur%%=*} cur=${cur#*=}
        _kube_proxy_value "$command" "$prev"
    elif [[ " $takes " == *" $prev "* ]]; then
        _kube_proxy_value "$command" "$prev"
    elif [[ $cur == -* ]]; then
        kind="words $options"
    elif [[ ${#typed[@]} -eq 1 ]]; then
        kind='words @NAMES@'
    else
        at=0
        for ((word = 2; word < ${#typed[@]}; word++)); do
            if [[ " $takes " == *" ${typed[word]} "* ]]; then
                ((word++))
            elif [[ ${typed[word]} != -* ]]; then
                ((at++))
            fi
        done
        kind=${positions[at]:-}
    fi
    _kube_proxy_reply
}

_kube_proxy_reply() {
    case $kind in
    file) compopt -o filenames; mapfile -t found < <(compgen -f -- "$cur") ;;
    folder) compopt -o filenames; mapfile -t found < <(compgen -d -- "$cur") ;;
    words*) mapfile -t found < <(compgen -W "${kind#words}" -- "$cur") ;;
    service | target) mapfile -t found < <(kube-proxy completion names "$cur" 2>/dev/null) ;;
    esac
    if [[ $kind == target && $cur != *:* && ${#found[@]} -gt 0 ]]; then
        compopt -o nospace
        found=("${found[@]/%/:}")
    fi
    # Readline has cut at the colon, and puts what is found behind it.
    if [[ $COMP_WORDBREAKS == *:* && $cur == *:* ]]; then
        found=("${found[@]#"${cur%"${cur##*:}"}"}")
    fi
    COMPREPLY=("${found[@]}")
}

_kube_proxy_value() {
    case "$1 $2" in
@VALUES@
    *) kind='' ;;
    esac
}

complete -F _kube_proxy kube-proxy
"""


def bash() -> str:
    """Return the script for bash, with its bash-completion package or without."""
    cases, values = [], []
    for grammar in _all():
        word = _word(grammar)
        takes = " ".join(name for option in grammar.options if option.value for name in option.names)
        options = " ".join(option.names[-1] for option in grammar.options)
        kinds = " ".join(shlex.quote(_bash_kind(position.value)) for position in grammar.positions)
        cases.append(
            f"    {word or '*'})\n        options='{options}'\n        takes='{takes}'\n"
            f"        positions=({kinds})\n        ;;"
        )
        for option in grammar.options:
            if option.value and (kind := _bash_kind(option.value)):
                pattern = " | ".join(
                    f"{shlex.quote(f'{word} {name}') if word else f'*{chr(32)!r}{name}'}" for name in option.names
                )
                values.append(f"    {pattern}) kind={shlex.quote(kind)} ;;")
    names = " ".join(_word(one) for one in commands())
    made = {"@COMMANDS@": "\n".join(cases), "@VALUES@": "\n".join(values), "@NAMES@": names}
    text = _BASH
    for mark, part in made.items():
        text = text.replace(mark, part)
    return text


def _bash_kind(value: Value) -> str:
    if value.words:
        return "words " + " ".join(value.words)
    return "" if value.kind is Kind.FREE else value.kind.value


# --- zsh

_ZSH = """\
#compdef kube-proxy
# Completion of kube-proxy for zsh, made by: kube-proxy completion zsh

_kube_proxy_services() {
    local -a found
    found=(${(f)"$(_call_program services kube-proxy completion names ${(q)PREFIX} 2>/dev/null)"})
    compadd "$@" -a found
}

_kube_proxy_targets() {
    if [[ $PREFIX == *:* ]]; then _kube_proxy_services "$@"; else _kube_proxy_services "$@" -S :; fi
}

_kube_proxy() {
    local -a commands
    commands=(
@NAMES@
    )
    if ((CURRENT == 2)) && [[ $PREFIX != -* ]]; then
        _describe command commands
        return
    fi
    case $words[2] in
@COMMANDS@
    esac
}

if [[ $funcstack[1] == _kube[-_]proxy ]]; then _kube_proxy "$@"; else compdef _kube_proxy kube-proxy; fi
"""
_ZSH_ACTIONS = {
    Kind.FREE: " ",
    Kind.FILE: "_files",
    Kind.FOLDER: "_files -/",
    Kind.SERVICE: "_kube_proxy_services",
    Kind.TARGET: "_kube_proxy_targets",
}


def zsh() -> str:
    """Return the script for zsh, a function of its own or to be read."""
    cases = []
    for grammar in _all():
        word = _word(grammar)
        specs = [*map(_zsh_option, grammar.options), *map(_zsh_position, grammar.positions)]
        shift = "        shift words; ((CURRENT--))\n" if word else ""
        body = " \\\n            ".join(specs)
        cases.append(f"    {word or '*'})\n{shift}        _arguments -s \\\n            {body}\n        ;;")
    names = "\n".join(f"        {shlex.quote(f'{_word(one)}:{_short(one.summary)}')}" for one in commands())
    return _ZSH.replace("@NAMES@", names).replace("@COMMANDS@", "\n".join(cases))


def _zsh_option(option: Option) -> str:
    # In the text between brackets, brackets and colons mean something.
    text = _short(option.text).replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")
    value = f":{option.value.name.replace(':', ' ')}:{_zsh_action(option.value)}" if option.value else ""
    specs = []
    for name in option.names:
        joined = "" if not option.value else "=" if name.startswith("--") else "+"
        others = f"({' '.join(option.names)})" if len(option.names) > 1 else ""
        specs.append(shlex.quote(f"{others}{name}{joined}[{text}]{value}"))
    return " ".join(specs)


def _zsh_position(position: Position) -> str:
    optional = "" if position.needed else ":"
    return shlex.quote(f":{optional}{position.value.name}:{_zsh_action(position.value)}")


def _zsh_action(value: Value) -> str:
    return f"({' '.join(value.words)})" if value.words else _ZSH_ACTIONS[value.kind]


# --- fish

_FISH = """\
# Completion of kube-proxy for fish, made by: kube-proxy completion fish

function __kube_proxy_services
    kube-proxy completion names (commandline -ct) 2>/dev/null
end

function __kube_proxy_targets
    if string match -q '*:*' -- (commandline -ct)
        __kube_proxy_services
    else
        string replace -r '$' ':' (__kube_proxy_services)
    end
end

complete -c kube-proxy -f
"""
_FISH_ACTIONS = {
    Kind.FREE: " -x",
    Kind.FILE: " -rF",
    Kind.FOLDER: " -x -a '(__fish_complete_directories)'",
    Kind.SERVICE: " -a '(__kube_proxy_services)'",
    Kind.TARGET: " -a '(__kube_proxy_targets)'",
}


def fish() -> str:
    """Return the script for fish."""
    names = " ".join(_word(one) for one in commands())
    lines = [
        f"complete -c kube-proxy -n __fish_use_subcommand -a {_word(one)} -d {_fish_quoted(_short(one.summary))}"
        for one in commands()
    ]
    for grammar in _all():
        word = _word(grammar)
        when = f"__fish_seen_subcommand_from {word}" if word else f"not __fish_seen_subcommand_from {names}"
        lines += (f"complete -c kube-proxy -n '{when}'{_fish_option(one)}" for one in grammar.options)
        lines += (
            f"complete -c kube-proxy -n '{when}'{_fish_value(one.value)}" for one in grammar.positions if _known(one)
        )
    return _FISH + "\n".join(lines) + "\n"


def _known(position: Position) -> bool:
    return bool(position.value.words) or position.value.kind is not Kind.FREE


def _fish_option(option: Option) -> str:
    names = "".join(f" -l {name[2:]}" if name.startswith("--") else f" -s {name[1:]}" for name in option.names)
    value = f" -r{_fish_value(option.value)}" if option.value else ""
    return f"{names}{value} -d {_fish_quoted(_short(option.text))}"


def _fish_value(value: Value) -> str:
    return f" -x -a {_fish_quoted(' '.join(value.words))}" if value.words else _FISH_ACTIONS[value.kind]


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SCRIPTS: Final[dict[str, Callable[[], str]]] = {"bash": bash, "zsh": zsh, "fish": fish}
FILES: Final[dict[str, str]] = {"bash": "kube-proxy.bash", "zsh": "_kube-proxy", "fish": "kube-proxy.fish"}
"""The file of each shell's script."""
