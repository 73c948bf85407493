class MindSpeedFeature:
    def __init__(self, feature_name, optimization_level=2):
        self.feature_name = feature_name.lower().strip().replace("-", "_")
        self.optimization_level = optimization_level
        self.default_patches = optimization_level == 0

    def is_need_apply(self, args):
        wanted = self.optimization_level <= args.optimization_level and getattr(args, self.feature_name, None)
        return wanted or self.default_patches

    def register_args(self, parser): ...
    def pre_validate_args(self, args): ...
    def validate_args(self, args): ...
    def post_validate_args(self, args): ...
    def pre_register_patches(self, patch_manager, args): ...
    def register_patches(self, patch_manager, args): ...

    @staticmethod
    def add_parser_argument_choices_value(parser, argument_name, new_choice):
        for action in parser._actions:
            if argument_name in action.option_strings and action.choices and new_choice not in action.choices:
                action.choices.append(new_choice)
