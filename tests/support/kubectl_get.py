"""Implements `kubectl get` for kubectl_stand_in.py, from its file. It imports little, because it starts often."""

import marshal
import sys

held, _, *words = sys.argv[1:]
options = dict(word[2:].split("=", 1) for word in words if word.startswith("--"))
resource, *names = [word for word in words if not word.startswith("--")]
with open(held, "rb") as file:
    rows, errors = marshal.load(file)
if resource in errors:
    sys.exit(errors[resource])
namespace = "" if "all-namespaces" in options or resource == "nodes" else options.get("namespace", "default")
key, _, value = options.get("selector", "").partition("=")
field, _, wanted = options.get("field-selector", "").partition("=")
found = [
    (name, text)
    for name, where, labels, ip, text in rows[resource]
    if namespace in {"", where}
    and (not key or (labels.get(key) and value in {"", labels[key]}))
    and wanted in {"", ip if field == "status.podIP" else name}
]
if not names:
    print(f'{{"items": [{", ".join(text for _, text in found)}]}}')
elif text := dict(found).get(names[0]):
    print(text)
else:
    sys.exit(f'Error from server (NotFound): {resource} "{names[0]}" not found')
