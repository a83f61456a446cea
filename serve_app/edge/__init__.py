"""A small model beside the user, the target elsewhere: both ends of ``/v1/edge``."""
