"""The proxy modes, one folder per mode. A backend translates the plans of `model` into kernel objects."""
