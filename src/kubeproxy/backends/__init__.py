"""One folder per proxy mode. A backend only translates plans; the semantics are in model."""
