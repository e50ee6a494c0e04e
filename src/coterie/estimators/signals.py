"""What the estimators warn of, by class, so that a filter can tell them apart."""


class PrivacyWarning(UserWarning):
    """What is done is not covered by the epsilon that is stated, or protects nobody."""


class NewClientWarning(UserWarning):
    """Rows of a client that was not trained with are answered by the shared model."""
