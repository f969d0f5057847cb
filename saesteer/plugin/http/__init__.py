"""The HTTP surface: the field in answers and streams, the guard, the admin routes, the OpenAPI document."""
