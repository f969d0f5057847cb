"""What HTTP clients see: the field in answers and streams, the guard, the admin routes, the OpenAPI document."""
